"""The Hugging Face hub: whether it can be reached, and which commit of a model came from it."""

import socket
from pathlib import Path
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies

from huggingface_hub import constants, try_to_load_from_cache


def hub_answers() -> bool:
    """Asked first: without a network transformers tries again and again for half a minute, and is loud about it."""
    if constants.HF_HUB_OFFLINE:
        return False
    hub = urlsplit(constants.ENDPOINT)
    proxy = getproxies().get(hub.scheme)
    if proxy is None:
        return _listens(hub)
    return _listens(urlsplit(proxy if "://" in proxy else f"http://{proxy}"))


def commit_of(name: str, revision: str | None) -> str | None:
    """The commit that the cache has of a model on the hub, whose folder is called by it."""
    config = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(config).parent.name if isinstance(config, str) else None


def _listens(address: SplitResult) -> bool:
    try:
        port = address.port or (443 if address.scheme == "https" else 80)
        socket.create_connection((address.hostname or "", port), timeout=5).close()
    except (OSError, ValueError):
        return False
    return True

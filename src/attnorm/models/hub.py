"""Whether the Hugging Face hub can be reached."""

import socket
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants


def hub_answers() -> bool:
    """Asked first: without a network transformers tries again and again for half a minute, and is loud about it."""
    if constants.HF_HUB_OFFLINE:
        return False
    address = urlsplit(constants.ENDPOINT)
    if address.scheme in getproxies():
        return True
    try:
        port = address.port or (443 if address.scheme == "https" else 80)
        socket.create_connection((address.hostname or "", port), timeout=5).close()
    except OSError:
        return False
    return True

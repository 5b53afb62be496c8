"""Whether the hub answers is asked of the way that transformers would take."""

import socket
from pathlib import Path

import pytest
from huggingface_hub import constants

from attnorm.models.source import commit_of, hub_answers

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def proxies(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
    return monkeypatch


@pytest.mark.parametrize("spelling", ["http://localhost:{}", "localhost:{}"])
def test_a_proxy_that_listens_is_trusted_and_one_that_does_not_is_no_network(
    proxies: pytest.MonkeyPatch, spelling: str
) -> None:
    with socket.create_server(("localhost", 0)) as server:
        proxies.setenv("https_proxy", spelling.format(server.getsockname()[1]))
        assert hub_answers()
    assert not hub_answers()


@pytest.mark.parametrize("proxy", ["http://localhost:notaport", "://", "http://"])
def test_a_proxy_that_makes_no_sense_is_no_network(proxies: pytest.MonkeyPatch, proxy: str) -> None:
    proxies.setenv("https_proxy", proxy)
    assert not hub_answers()


def test_the_commit_is_that_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert commit_of("someone/model", None) is None
    snapshot = tmp_path / "models--someone--model" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    assert commit_of("someone/model", None) == COMMIT
    assert commit_of("someone/model", COMMIT) == COMMIT
    assert commit_of("someone/model", "v2") is None

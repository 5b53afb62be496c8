"""Images and sound reach a model through its own processor."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import wavfile
from transformers import ViTImageProcessor, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration
from typer.testing import CliRunner

import attnorm
from attnorm.cli import app
from attnorm.models.inputs import Media
from attnorm.models.media import _read_sound
from tests.analysis.tiny_models import vit


@pytest.fixture
def image(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 255, (30, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "cat.png")
    return tmp_path / "cat.png"


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    wavfile.write(tmp_path / "hum.wav", 8000, np.full((8000, 2), 8192, dtype=np.int16))
    return tmp_path / "hum.wav"


@pytest.fixture
def vit_folder(tmp_path: Path) -> Path:
    vit().save_pretrained(tmp_path / "vit")
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path / "vit")
    return tmp_path / "vit"


def whisper(folder: Path) -> Path:
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=64, d_model=32, encoder_layers=2, decoder_layers=1, encoder_attention_heads=4, num_mel_bins=16,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=50, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=3, begin_suppress_tokens=None,
    )  # fmt: skip
    WhisperForConditionalGeneration(config).save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=16, chunk_length=1).save_pretrained(folder)
    return folder


def test_an_image_is_measured_as_its_pixel_values_are(vit_folder: Path, image: Path) -> None:
    pixels = ViTImageProcessor.from_pretrained(vit_folder)(images=Image.open(image), return_tensors="pt")
    expected = attnorm.analyze(vit_folder, dict(pixels), metrics="core").heads
    found = attnorm.analyze(vit_folder, Media(image, "image"), metrics="core").heads
    assert found["entropy_nats"].to_pylist() == expected["entropy_nats"].to_pylist()
    assert found["text"].to_pylist() == [str(image)] * 8


def test_sound_reaches_encoder_and_decoder(tmp_path: Path, sound: Path) -> None:
    analysis = attnorm.analyze(whisper(tmp_path / "whisper"), Media(sound, "audio"), metrics="core")
    assert set(analysis.heads["kind"].to_pylist()) == {"encoder", "decoder", "cross"}


def test_sound_is_one_channel_at_the_rate_of_the_model(sound: Path) -> None:
    samples = _read_sound(sound, 16000)
    assert (samples.shape, samples.dtype) == ((16000,), np.float32)
    assert samples[8000] == pytest.approx(0.25, rel=1e-2)


def test_the_command_line_takes_an_image(vit_folder: Path, image: Path) -> None:
    options = ["--metrics", "core", "--no-html", "--json"]
    done = CliRunner().invoke(app, ["analyze", str(vit_folder), "--image", str(image), *options])
    assert done.exit_code == 0, done.output
    assert "cat.png" in done.output
    assert f"--image {image} --metrics all" in done.output  # the advice names the command, not a Python call


def test_a_model_of_images_or_sound_without_a_file_asks_for_one(vit_folder: Path, tmp_path: Path) -> None:
    for folder, option in ((vit_folder, "--image"), (whisper(tmp_path / "whisper"), "--audio")):
        refused = CliRunner().invoke(app, ["analyze", str(folder), "--no-html"])
        assert refused.exit_code == 2
        assert option in refused.output
        assert "--tokenizer" not in refused.output


def test_an_image_is_no_text_that_compare_reads_again(vit_folder: Path, image: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    attnorm.analyze(vit_folder, Media(image, "image"), metrics="core").save(run)
    refused = CliRunner().invoke(app, ["compare", str(run), str(vit_folder)])
    assert refused.exit_code == 2
    assert "--image" in refused.output
    assert "--text" not in refused.output


@pytest.mark.parametrize("option", ["--image", "--audio"])
def test_a_file_that_is_not_there_is_wrong_usage(vit_folder: Path, option: str) -> None:
    done = CliRunner().invoke(app, ["analyze", str(vit_folder), option, "missing.png"])
    assert done.exit_code == 2
    assert "missing.png" in done.output


def test_what_cannot_be_read_is_named(vit_folder: Path, image: Path, tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "text.wav").write_text("no sound at all, but long enough")
    (tmp_path / "song.mp3").write_bytes(b"ID3")
    with pytest.raises(ValueError, match=r"text\.png"):
        attnorm.analyze(vit_folder, Media(tmp_path / "text.png", "image"))
    with pytest.raises(ValueError, match="feature extractor"):
        attnorm.analyze(vit_folder, Media(tmp_path / "text.wav", "audio"))
    folder = whisper(tmp_path / "whisper")
    for name in ("text.wav", "song.mp3"):
        with pytest.raises(ValueError, match=name):
            attnorm.analyze(folder, Media(tmp_path / name, "audio"))
    with pytest.raises(ValueError, match="image processor"):
        attnorm.analyze("bundled", Media(image, "image"))


@pytest.mark.parametrize(
    ("kind", "samples", "expected"),
    [
        ("8 bits", np.array([0, 64, 128, 192, 255], dtype=np.uint8), [-1, -0.5, 0, 0.5, 127 / 128]),
        ("16 bits", np.array([-32768, 0, 16384], dtype=np.int16), [-1, 0, 0.5]),
        ("32 bits", np.array([-(2**31), 0, 2**30], dtype=np.int32), [-1, 0, 0.5]),
        ("floating", np.array([-0.25, 0, 0.75], dtype=np.float32), [-0.25, 0, 0.75]),
        ("two channels", np.array([[8192, -8192], [16384, 0]], dtype=np.int16), [0, 0.25]),
    ],
)
def test_samples_lie_between_minus_1_and_1(
    kind: str, samples: np.ndarray, expected: list[float], tmp_path: Path
) -> None:
    wavfile.write(tmp_path / "a.wav", 8000, samples)
    assert _read_sound(tmp_path / "a.wav", 8000).tolist() == pytest.approx(expected)


def test_errors_of_files_and_processors_say_why(
    vit_folder: Path, image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"lost\.png.*No such file"):
        attnorm.analyze(vit_folder, Media(tmp_path / "lost.png", "image"))
    for error, reason in ((OSError("a reason. And more\nlines"), r"\(a reason\)"), (KeyError(), r"\(KeyError\)")):

        def fails(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        monkeypatch.setattr("transformers.AutoImageProcessor.from_pretrained", fails)
        with pytest.raises(ValueError, match=reason):
            attnorm.analyze(vit_folder, Media(image, "image"))

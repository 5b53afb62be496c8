"""Images and sound reach a model through its own processor."""

import base64
import io
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace

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
from attnorm.models.media import _read_sound, picture_of
from attnorm.report.page import payload
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


def pixels_of(png: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(png.partition(",")[2]))))


def test_the_picture_has_the_pixels_of_the_model() -> None:
    values = torch.linspace(-1, 1, 3 * 8 * 12).reshape(1, 3, 8, 12)
    picture = picture_of({"pixel_values": values}, SimpleNamespace(patch_size=4))
    assert picture is not None
    assert (picture.rows, picture.columns) == (2, 3)
    assert isinstance(picture.rows, int)
    assert isinstance(picture.columns, int)
    expected = (255 * (values[0] + 1) / 2).round().permute(1, 2, 0).numpy()
    assert np.array_equal(pixels_of(picture.png), expected)


def test_a_large_image_becomes_small_and_a_gray_one_has_three_channels() -> None:
    picture = picture_of({"pixel_values": torch.rand(1, 1, 336, 336)}, SimpleNamespace(patch_size=14))
    assert picture is not None
    assert pixels_of(picture.png).shape == (112, 112, 3)
    assert picture.rows == 24


@pytest.mark.parametrize(
    ("inputs", "patch"),
    [
        ({"input_ids": torch.zeros(1, 3)}, 4),
        ({"pixel_values": torch.zeros(1, 2, 3, 8, 8)}, 4),  # video
        ({"pixel_values": torch.zeros(1, 3, 8, 8)}, None),
        ({"pixel_values": torch.zeros(1, 3, 8, 8)}, 16),
        ({"pixel_values": torch.zeros(1, 3, 8, 16)}, 9),
        ({"pixel_values": torch.zeros(1, 3, 16, 8)}, 9),
        ({"pixel_values": torch.zeros(1, 2, 8, 8)}, 4),
        ({"pixel_values": torch.zeros(1, 4, 8, 8)}, 4),
    ],
)
def test_other_inputs_have_no_picture(inputs: dict[str, torch.Tensor], patch: int | None) -> None:
    assert picture_of(inputs, SimpleNamespace(patch_size=patch)) is None


@pytest.mark.parametrize(("side", "pixels"), [(1, 1), (159, 159), (160, 160), (161, 81), (320, 160), (321, 107)])
def test_the_longer_side_has_at_most_160_pixels(side: int, pixels: int) -> None:
    picture = picture_of({"pixel_values": torch.rand(2, 1, side, 1)}, SimpleNamespace(patch_size=1))
    assert picture is not None
    assert pixels_of(picture.png).shape == (pixels, 1, 3)
    assert picture.as_dict() == {"png": picture.png, "rows": side, "columns": 1}


@pytest.mark.parametrize("value", [0.0, 2.5, float("nan")])
def test_an_image_of_one_value_is_black(value: float) -> None:
    picture = picture_of({"pixel_values": torch.full((1, 3, 2, 2), value)}, SimpleNamespace(patch_size=2))
    assert picture is not None
    assert (picture.rows, picture.columns) == (1, 1)
    assert not pixels_of(picture.png).any()


def test_small_differences_are_stretched_to_black_and_white() -> None:
    values = torch.tensor([0.5, 0.5 + 1e-5])[None, None, None]
    picture = picture_of({"pixel_values": values}, SimpleNamespace(patch_size=1))
    assert picture is not None
    assert pixels_of(picture.png)[0].tolist() == [[0, 0, 0], [255, 255, 255]]


IMAGE = {"pixel_values": torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))}


def test_every_patch_of_the_class_token_and_the_middle_is_stored_and_shown() -> None:
    analysis = attnorm.analyze(vit(), IMAGE, metrics="core")
    one = analysis.reads.to_pylist()[0]
    own = [r for r in analysis.reads.to_pylist() if (r["layer"], r["head"]) == (one["layer"], one["head"])]
    assert sorted({r["row"] for r in own}) == [0, 11]  # 1 + row 2 of 4, column 2 of 4
    assert sorted(r["key"] for r in own if r["row"] == 0) == list(range(17))
    assert sum(r["weight"] for r in own if r["row"] == 0) == pytest.approx(1, abs=1e-5)
    shown = payload(analysis.report_data)
    assert shown["pictures"][0]["rows"] == 4
    assert shown["reads"]["left_out"] == 0


def test_chosen_rows_and_keys_are_kept_and_without_keys_no_picture_is_stored() -> None:
    chosen = attnorm.analyze(vit(), IMAGE, metrics="core", read_keys=3, read_rows=(2,))
    assert {r["row"] for r in chosen.reads.to_pylist()} == {2}
    assert max(r["rank"] for r in chosen.reads.to_pylist()) == 3
    private = attnorm.analyze(vit(), IMAGE, metrics="core", read_keys=0)
    assert "pictures" not in private.manifest


def test_only_a_png_as_data_reaches_the_page() -> None:
    analysis = attnorm.analyze(vit(), IMAGE, metrics="core")
    (name,) = analysis.manifest["pictures"]
    analysis.manifest["pictures"][name]["png"] = "https://example.org/track.png"
    assert payload(analysis.report_data)["pictures"] == {}


def test_the_header_of_the_png_is_that_of_the_standard() -> None:
    """Width, height, 8 bits, RGB, and the only methods that there are of compression, filters and lines."""
    picture = picture_of({"pixel_values": torch.rand(1, 3, 8, 12)}, SimpleNamespace(patch_size=4))
    assert picture is not None
    content = base64.b64decode(picture.png.partition(",")[2])
    assert content[:16] == b"\x89PNG\r\n\x1a\n" + b"\0\0\0\rIHDR"
    assert struct.unpack(">IIBBBBB", content[16:29]) == (12, 8, 8, 2, 0, 0, 0)
    assert content[29:33] == struct.pack(">I", zlib.crc32(content[12:29]))

"""The decoder of images: every encoding, padding, and what cannot be used."""

import io
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from torchperf_ros.api.errors import BadInput
from torchperf_ros.api.messages import empty_message
from torchperf_ros.api.pixels import ENCODINGS, compressed_pixels, compressed_size, pixels, raw_pixels

HEIGHT, WIDTH = 20, 30
NAMES = ("rgb8", "bgr8", "8UC3", "mono8")


def picture(height=HEIGHT, width=WIDTH) -> np.ndarray:
    """An RGB picture with structure: [height, width, 3] uint8."""
    y, x = np.mgrid[0:height, 0:width]
    red, green = x * 240 // width, y * 240 // height
    return np.stack((red, green, (x * 6 // width + y * 5 // height) % 2 * 200), axis=2).astype(np.uint8)


def image(encoding="rgb8", pixels=None, padding=0, **changes):
    """A message with these bytes; padding at the ends of rows is noise."""
    pixels = picture() if pixels is None else pixels
    height, width = pixels.shape[:2]
    rows = np.ascontiguousarray(pixels).reshape(height, -1).view(np.uint8)
    rows = np.concatenate((rows, np.full((height, padding), 77, np.uint8)), axis=1)
    values = {
        "encoding": encoding,
        "height": height,
        "width": width,
        "step": rows.shape[1],
        "data": rows.reshape(-1),
    }
    return empty_message("sensor_msgs/msg/Image", **values | changes)


def compressed(data: bytes, form="jpeg", **fields):
    data = np.frombuffer(data, np.uint8)
    return empty_message("sensor_msgs/msg/CompressedImage", format=form, data=data, **fields)


def file_of(pixels, kind="PNG", mode=None) -> bytes:
    buffer = io.BytesIO()
    made = Image.fromarray(pixels)
    (made.convert(mode) if mode else made).save(buffer, kind, **({"quality": 95} if kind == "JPEG" else {}))
    return buffer.getvalue()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_given_any_encoding_and_padded_rows_when_decoded_then_the_picture_is_the_same_in_red_green_blue(
    encoding,
):
    grey, alpha = picture()[..., 0], np.full((HEIGHT, WIDTH, 1), 9, np.uint8)
    colour = picture()[..., ::-1] if encoding[:3] in {"bgr", "8UC"} else picture()
    pixels, expected = colour, picture()
    if encoding in {"rgba8", "bgra8"}:
        pixels = np.concatenate((colour, alpha), axis=2)
    elif encoding in {"mono16", "16UC1"}:
        pixels, expected = grey.astype("<u2") * 4, (grey * (255 / grey.max())).astype(np.uint8)[..., None]
    elif encoding.startswith(("mono", "bayer", "8UC1")):
        pixels, expected = grey, grey[..., None]
    decoded = raw_pixels(image(encoding, pixels, padding=7)).rgb()
    assert decoded.shape == (HEIGHT, WIDTH, 3)
    assert np.abs(decoded.astype(int) - expected).max() <= (1 if "16" in encoding else 0)


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA"])
def test_given_a_png_of_any_8_bit_mode_when_decoded_then_it_has_the_size_that_its_header_says(mode):
    message = compressed(file_of(picture(), mode=mode))
    assert compressed_pixels(message).rgb().shape == (HEIGHT, WIDTH, 3)
    assert compressed_size(message) == (WIDTH, HEIGHT)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("orientation", [*range(1, 9), 0, 77])
def test_given_a_file_that_says_how_it_has_to_be_turned_when_decoded_then_the_picture_is_upright(
    kind, orientation
):
    upright = Image.fromarray(picture())
    turns = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # by EXIF, what undoes each, as Pillow numbers them
    lying = upright.transpose(Image.Transpose(turns[orientation])) if orientation in turns else upright
    exif, buffer = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    lying.save(buffer, kind, exif=exif, **({"quality": 95} if kind == "JPEG" else {}))
    message = compressed(buffer.getvalue())
    found = compressed_pixels(message).rgb()
    assert compressed_size(message) == (WIDTH, HEIGHT)
    assert np.abs(found.astype(int) - picture()).mean() < 25  # 60 and more where it lies


def test_given_a_compressed_bayer_pattern_when_decoded_then_it_is_grey_only_for_whom_raw_ones_are():
    message = compressed(file_of(picture()[..., 0]))
    message.format = "bayer_rggb8; jpeg compressed "
    assert compressed_pixels(message).order == "mono"
    with pytest.raises(
        BadInput, match="'bayer_rggb8; jpeg compressed ' is a Bayer pattern, debayer it first"
    ):
        compressed_pixels(message, encodings=NAMES)
    in_colour = compressed(file_of(picture()))
    in_colour.format = "bayer_rggb8; jpeg compressed bgr8"
    assert compressed_pixels(in_colour, encodings=NAMES).order == "rgb"


@settings(max_examples=40, deadline=None)
@given(where=st.integers(0, 10_000), value=st.integers(0, 255), kind=st.sampled_from(["PNG", "JPEG"]))
def test_given_one_damaged_byte_when_decoded_then_it_works_or_is_refused(where, value, kind):
    data = bytearray(file_of(picture(), kind))
    data[where % len(data)] = value
    try:
        assert compressed_pixels(compressed(bytes(data))).rgb().dtype == np.uint8
    except BadInput as refused:
        assert str(refused)  # noqa: PT017 - either is right


DEPTH = np.random.default_rng(1).integers(0, 65_536, (40, 50), dtype=np.uint16)


def bayer_of(colours, first_rows):
    """One value of each pixel's colours, as the pattern of letters says."""
    found = np.empty(colours.shape[:2], np.uint8)
    for row, letters in enumerate(first_rows):
        for column, letter in enumerate(letters):
            found[row::2, column::2] = colours[row::2, column::2, "RGB".index(letter)]
    return found


def yuv_of(colours):
    """Brightness and colour differences of BT.601 in its limited range: three planes of uint8."""
    red, green, blue = colours.astype(float).transpose(2, 0, 1)
    y = 16 + 0.257 * red + 0.504 * green + 0.098 * blue
    u = 128 - 0.148 * red - 0.291 * green + 0.439 * blue
    v = 128 + 0.439 * red - 0.368 * green - 0.071 * blue
    return [np.round(each).astype(np.uint8) for each in (y, u, v)]


def smooth(height=HEIGHT, width=WIDTH):
    """Colours that change so slowly that a pattern of them loses next to nothing."""
    y, x = np.mgrid[0:height, 0:width]
    return np.stack((60 + 4 * x, 200 - 5 * y, 40 + 2 * x + 3 * y), axis=2).astype(np.uint8)


def in_pairs(first, second):
    return np.stack((first, second), axis=2)


def made(encoding):
    """A message of this encoding that shows `smooth`, with 6 bytes of noise at the end of each row."""
    colours = smooth()
    y, u, v = yuv_of(colours)
    alternating = u.copy()
    alternating[:, 1::2] = v[:, ::2]
    other = v.copy()
    other[:, 1::2] = u[:, ::2]
    opaque = np.full((HEIGHT, WIDTH, 1), 255, np.uint8)
    bytes_of = {
        "rgb8": colours,
        "bgr8": colours[..., ::-1],
        "8UC3": colours[..., ::-1],
        "rgba8": np.concatenate((colours, opaque), axis=2),
        "bgra8": np.concatenate((colours[..., ::-1], opaque), axis=2),
        "bayer_rggb8": bayer_of(colours, ("RG", "GB")),
        "bayer_bggr8": bayer_of(colours, ("BG", "GR")),
        "bayer_gbrg8": bayer_of(colours, ("GB", "RG")),
        "bayer_grbg8": bayer_of(colours, ("GR", "BG")),
        "yuv422": in_pairs(alternating, y),
        "uyvy": in_pairs(alternating, y),
        "yuv422_yuy2": in_pairs(y, alternating),
        "yuyv": in_pairs(y, alternating),
        "nv12": np.concatenate((y, alternating[::2])),
        "nv21": np.concatenate((y, other[::2])),
    }[encoding]
    return image(encoding, bytes_of, padding=6, height=HEIGHT)


@pytest.mark.parametrize(
    "encoding",
    ["rgb8", "bgr8", "8UC3", "rgba8", "bgra8", "bayer_rggb8", "bayer_bggr8", "bayer_gbrg8", "bayer_grbg8"]
    + ["yuv422", "uyvy", "yuv422_yuy2", "yuyv", "nv12", "nv21"],
)
def test_given_an_encoding_with_colours_when_its_pixels_are_asked_for_then_they_are_red_green_blue(
    encoding,
):
    found = pixels(made(encoding))
    assert (found.shape, found.dtype) == ((HEIGHT, WIDTH, 3), np.uint8)
    most = 0 if encoding[:3] in {"rgb", "bgr", "8UC"} else 8
    assert np.abs(found.astype(int) - smooth())[1:-1, 1:-1].max() <= most


@pytest.mark.parametrize("big_endian", [0, 1])
@pytest.mark.parametrize(
    ("encoding", "kind"),
    [("mono8", "u1"), ("8UC1", "u1"), ("mono16", "u2"), ("16UC1", "u2"), ("32FC1", "f4")],
)
def test_given_one_channel_when_its_pixels_are_asked_for_then_the_values_are_those_that_were_sent(
    encoding, kind, big_endian
):
    values = (np.arange(HEIGHT * WIDTH).reshape(HEIGHT, WIDTH) % 251).astype(kind) * np.array(1).astype(
        kind
    )
    sent = values.astype(np.dtype(kind).newbyteorder(">" if big_endian else "<"))
    found = pixels(image(encoding, sent, padding=3, width=WIDTH, is_bigendian=big_endian))
    assert (found.shape, found.dtype) == ((HEIGHT, WIDTH, 1), np.dtype(kind))
    assert (found[..., 0] == values).all()


def test_given_a_png_of_16_bits_when_its_pixels_are_asked_for_then_it_keeps_them():
    depth = (np.arange(HEIGHT * WIDTH).reshape(HEIGHT, WIDTH) * 100).astype(np.uint16)
    found = pixels(compressed(file_of(depth)))
    assert (found[..., 0] == depth).all()
    assert found.dtype == np.uint16


@pytest.mark.parametrize("form", ["compressedDepth png", "compressedDepth"])
def test_given_depths_as_their_image_transport_compresses_them_when_asked_for_then_they_are_those_that_were_sent(
    form,
):
    sent = np.linspace(0.4, 9.9, HEIGHT * WIDTH, dtype=np.float32).reshape(HEIGHT, WIDTH)
    sent[0, :2] = np.nan, 12.0  # no depth, and more than its depth_max, 10 m
    scale, shift = 10_100.0, -1009.0  # of its depth_quantization, 100
    kept = np.where(sent < 10.0, scale / sent + shift, 0).astype(np.uint16)
    message = compressed(bytes(4) + np.array([scale, shift], "<f4").tobytes() + file_of(kept))
    for encoding, values, most in (("16UC1", kept, 0), ("32FC1", np.where(kept, sent, np.nan), 0.01)):
        message.format = f"{encoding}; {form}"
        found = pixels(message)[..., 0]
        np.testing.assert_allclose(found, values, rtol=0, atol=most)
        assert found.dtype == {"16UC1": np.uint16, "32FC1": np.float32}[encoding]


def test_given_a_file_when_its_pixels_are_asked_for_then_they_are_upright_and_patterns_have_colours():
    assert np.abs(pixels(compressed(file_of(smooth(), "JPEG"))).astype(int) - smooth()).mean() < 4
    assert pixels(compressed(file_of(smooth()[..., 0]))).shape == (HEIGHT, WIDTH, 1)
    message = compressed(file_of(bayer_of(smooth(), ("RG", "GB"))))
    message.format = "bayer_rggb8; png compressed"
    assert np.abs(pixels(message).astype(int) - smooth())[1:-1, 1:-1].max() <= 8


@pytest.mark.parametrize(
    ("decoded", "says"),
    [
        *(
            (partial(raw_pixels, image(**changes), encodings=NAMES), says)
            for changes, says in (
                ({"height": 0}, "empty: width 30, height 0"),
                ({"height": 21}, "1800 bytes, less than step 90 .* height 21 = 1890"),
                ({"step": 89}, "step is 89 bytes, less than width 30 .* 3 bytes = 90"),
                ({"height": 2**32 - 1, "width": 2**32 - 1}, "larger than max_pixels 67108864"),
                ({"encoding": "bayer_rggb8"}, "'bayer_rggb8' is a Bayer pattern.*rgb8, bgr8, 8UC3, mono8"),
                ({"encoding": "rgba8"}, "'rgba8' is not supported; supported: rgb8, bgr8, 8UC3, mono8"),
                ({"encoding": ""}, "'' is not supported"),
            )
        ),
        *(
            (partial(compressed_pixels, compressed(data), 90_000), says)
            for data, says in (
                (b"", "0 bytes .*neither JPEG nor PNG"),
                (file_of(picture(), "JPEG")[:400], "cannot be decoded"),
                (file_of(picture())[:100], "cannot be decoded"),
                (file_of(picture(), "GIF"), "neither JPEG nor PNG"),
                (
                    file_of(np.full((40, 50), 1000, dtype=np.uint16)),
                    "mode 'I;16'.*supported: L, P, RGB, RGBA",
                ),
                (
                    file_of(np.zeros((200, 500), dtype=np.uint8)),
                    "500 x 200 = 100000 pixels is larger than max_pixels 90000",
                ),
            )
        ),
        *(
            (partial(pixels, message), says)
            for message, says in (
                (image("yuv444"), "'yuv444' is not supported; supported: rgb8, .*, nv21"),
                (
                    image("nv12", picture()[..., 0]),
                    "data has 600 bytes, less than step 30 .* height 30 = 900",
                ),
                (image("yuv422", np.zeros((4, 3, 2), np.uint8)), "'yuv422' has width 3; it has to be even"),
                (image("nv12", np.zeros((3, 4), np.uint8)), "'nv12' has height 3; it has to be even"),
                (
                    image("bayer_rggb8", np.zeros((1, 4), np.uint8)),
                    "4 x 1 pixels is too small for a Bayer pattern",
                ),
                (
                    image("32FC1", np.zeros((4, 4), np.float32), step=15),
                    "step is 15 bytes, less than width 4 .* 4 bytes = 16",
                ),
                (image("rgb8", height=0), "empty: width 30, height 0"),
                (compressed(b"GIF89a"), "neither JPEG nor PNG"),
                (
                    compressed(bytes(12) + b"rvl", "16UC1; compressedDepth rvl"),
                    "[Dd]epth rvl'\\) is neither",
                ),
                (compressed(file_of(DEPTH)[:900]), "of 900 bytes .* cannot be decoded"),
            )
        ),
    ],
)
def test_given_an_image_that_cannot_be_used_when_decoded_then_the_error_says_what_and_why(decoded, says):
    with pytest.raises(BadInput, match=says):
        decoded()


@settings(max_examples=60, deadline=None)
@given(
    encoding=st.sampled_from(["rgb8", "mono16", "32FC1", "yuv422", "nv12", "bayer_rggb8", "bgra8"]),
    height=st.integers(0, 9),
    width=st.integers(0, 9),
    step=st.integers(0, 40),
    size=st.integers(0, 400),
)
def test_given_any_sizes_when_pixels_are_asked_for_then_they_have_the_images_size_or_are_refused(
    encoding, height, width, step, size
):
    message = image(encoding, height=height, width=width, step=step, data=np.zeros(size, np.uint8))
    try:
        assert pixels(message).shape[:2] == (height, width)
    except BadInput as refused:
        assert str(refused)  # noqa: PT017 - either is right

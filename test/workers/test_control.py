"""Typed messages between node and worker: they arrive as they were, and nothing else is taken."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchperf_ros.api.errors import ProtocolError
from torchperf_ros.settings.build_options import BuildOptions, ShapeOptions
from torchperf_ros.workers.calibration import Calibration
from torchperf_ros.workers.control import (
    COMMANDS,
    REPORTS,
    BeginCapture,
    EndCapture,
    LastWords,
    MemoryReport,
    Ready,
    TierFacts,
    TierReport,
    pack_message,
    pack_readable,
    unpack_message,
)
from torchperf_ros.workers.incident_folder import EvidenceLimits
from torchperf_ros.workers.protocol import (
    MAX_CONTROL_BYTES,
    OBSERVE,
    REQUEST_BYTES,
    RUN,
    VERSION,
    Request,
    Response,
    pack_control,
    pack_report,
    shapes_text,
    unpack_control,
    unpack_request,
    unpack_requests,
    unpack_response,
)
from torchperf_ros.workers.worker_setup import WorkerSetup

FACTS = TierFacts("full", "aoti", hits=3, waste=0.5)
READY = Ready((Calibration(1.0, 2.5),), (FACTS,), ("fast",))
SETUP = WorkerSetup(
    stage="seeing",
    adapter="a:B",
    options={"a": [1, {"b": None}]},
    tiers=("full", "fast"),
    build=(BuildOptions(), BuildOptions("aoti", cuda_graphs=True)),
    packages=("", "/there/fast.pt2"),
    loaded=(0, 1),
    lower=(1, -1),
    shapes=ShapeOptions("bucket", 16, (((1, 3, 8, 8), (1, 6)),)),
    evidence=EvidenceLimits("there", 64),
    calibrations=(Calibration(1.0, 2.0),) * 2,
    swapped=1,
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(REPORTS).flatmap(st.from_type))
def test_given_any_report_when_sent_then_it_arrives_as_it_was(report):
    # nan is not equal to itself
    assert repr(unpack_message(pack_message(report), *REPORTS)) == repr(report)


@pytest.mark.parametrize(
    ("message", "kinds"),
    [
        (SETUP, [WorkerSetup]),
        (BeginCapture("profile", EvidenceLimits("there", 64)), COMMANDS),
        (EndCapture(), COMMANDS),
    ],
)
def test_given_a_setup_or_a_command_when_sent_then_it_arrives_as_it_was(message, kinds):
    assert unpack_message(pack_message(message), *kinds) == message


def test_given_a_report_with_long_texts_when_sent_for_people_then_their_ends_arrive():
    facts = TierFacts("full", "eager", guards="guard " * 20_000)
    found = unpack_message(pack_readable(TierReport((facts,), 0)), *REPORTS)
    assert found.tiers[0].guards.endswith("guard guard ")


def changed(message, **fields):
    return json.dumps({**json.loads(pack_message(message)), **fields}).encode()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (changed(READY, kind="Nonsense"), "unknown control message 'Nonsense'; it has to be one of Desc"),
        (changed(READY, kind="EndCapture"), "unknown control message 'EndCapture'"),
        (changed(READY, missing="fast"), "Ready.missing is 'fast'"),
        (changed(READY, missing=[1]), "Ready.missing is '1'"),
        (changed(READY, calibrations=[{"median_ms": "1", "p99_ms": 1}]), "Ready.calibrations.median_ms"),
        (changed(READY, calibrations=[{"median_ms": 1.0}]), "Ready.calibrations has the fields median_ms"),
        (changed(READY, more=1), "Ready has the fields .*, more: 'more'"),
        (changed(MemoryReport({}), bytes={"kept": 1.5}), "MemoryReport.bytes.kept is '1.5'"),
        (changed(LastWords("x"), permanent=1), "LastWords.permanent is '1'"),
        (json.dumps({"version": VERSION, "kind": "Progress"}).encode(), "Progress has the fields "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_given_what_is_none_of_its_fields_when_received_then_the_error_names_it(data, said):
    with pytest.raises(ProtocolError, match=said):
        unpack_message(data, *REPORTS)


# -- the words of each frame


u64 = st.integers(0, 2**64 - 1)
kinds = st.sampled_from([OBSERVE, RUN, RUN | OBSERVE])
u32 = st.integers(0, 2**32 - 1)
u16 = st.integers(0, 2**16 - 1)
requests = st.builds(Request, kinds, u16, u64, u64, u64, u64, u32, u32, u16)
i64 = st.integers(-(2**63), 2**63 - 1)
shapes = st.lists(st.lists(st.integers(0, 4000), max_size=4), max_size=12).map(shapes_text)
responses = st.builds(
    Response, u16, u32, u64, u64, i64, i64, i64, i64, u32, st.integers(-1, 9), u16, u16, shapes
)


@given(requests, responses)
def test_given_any_request_or_response_when_packed_then_it_is_unpacked_as_it_was(request, response):
    assert unpack_request(request.pack()) == request
    assert unpack_response(response.pack()) == response


@given(st.lists(requests, min_size=1, max_size=64), st.integers(1, REQUEST_BYTES - 1))
def test_given_requests_in_one_packet_when_unpacked_then_they_come_in_order_and_a_cut_one_is_an_error(
    batch, cut
):
    packet = b"".join(request.pack() for request in batch)
    assert unpack_requests(packet) == batch
    with pytest.raises(ProtocolError, match=f"request of {REQUEST_BYTES - cut} bytes"):
        unpack_requests(packet[:-cut])


def test_given_shapes_when_put_into_words_then_what_does_not_fit_is_cut_and_says_so():
    assert shapes_text([(1, 3, 480, 640), (1, 6), ()]) == b"1x3x480x640 1x6 scalar"
    assert shapes_text([]) == b""
    assert shapes_text([(1000, 1000, 1000)] * 9) == (b"1000x1000x1000 " * 3)[:45] + b"..."


@given(st.binary(max_size=100))
def test_given_any_bytes_when_unpacked_then_they_are_a_message_or_a_protocol_error(data):
    for unpack in (unpack_request, unpack_response, unpack_control):
        try:
            unpack(data)
        except ProtocolError:
            continue


@given(response=responses, request=requests)
def test_given_another_length_or_version_when_unpacked_then_the_error_says_which(request, response):
    for message, unpack in ((request, unpack_request), (response, unpack_response)):
        data = message.pack()
        for wrong in (b"", data[:-1], data + b"\0"):
            with pytest.raises(
                ProtocolError, match=f"{len(wrong)} bytes; version {VERSION} has {len(data)}"
            ):
                unpack(wrong)
        with pytest.raises(
            ProtocolError, match=f"of version {VERSION + 1}; this side speaks version {VERSION}"
        ):
            unpack((VERSION + 1).to_bytes(2, "little") + data[2:])


def test_given_a_long_text_when_packed_then_its_end_arrives_where_a_traceback_says_what_happened():
    text = "x" * 100_000 + "ValueError: the end"
    found = unpack_control(pack_control("error", text=text))["text"]
    assert found.endswith("ValueError: the end")
    assert text.endswith(found)
    assert len(found) == 8000


def test_given_a_long_text_of_the_widest_characters_when_packed_then_it_still_fits():
    text = "\N{GRINNING FACE}" * 100_000
    assert len(pack_control("error", text=text)) <= MAX_CONTROL_BYTES


@pytest.mark.parametrize(
    ("pack", "kind", "fields"),
    [
        (pack_control, "setup", {"options": {"x": "y" * MAX_CONTROL_BYTES}}),
        (pack_report, "tiers", {"tiers": [1.5] * MAX_CONTROL_BYTES}),
    ],
    ids=["setup", "tiers"],
)
def test_given_fields_or_numbers_beyond_the_bound_when_packed_then_it_is_refused(pack, kind, fields):
    with pytest.raises(ProtocolError, match=f"'{kind}' of .* at most {MAX_CONTROL_BYTES}"):
        pack(kind, **fields)


@settings(max_examples=25, deadline=None)
@given(
    tiers=st.lists(
        st.dictionaries(st.sampled_from(["why", "choice", "guards"]), st.integers(0, 40_000)), max_size=12
    ),
    letter=st.sampled_from(["x", "\N{GRINNING FACE}", '"']),
)
def test_given_long_texts_deep_in_a_report_when_packed_then_it_fits_and_keeps_their_ends(tiers, letter):
    said = [{key: letter * length + "!" for key, length in tier.items()} for tier in tiers]
    found = unpack_control(pack_report("tiers", tiers=said, out_of_memory=7))
    assert [set(tier) for tier in found["tiers"]] == [set(tier) for tier in said]
    assert found["out_of_memory"] == 7
    for tier, was in zip(found["tiers"], said, strict=True):
        assert all(
            was[key].endswith(text.removeprefix("...")) and text[-1] == "!" for key, text in tier.items()
        )


def test_given_a_report_that_fits_when_packed_then_nothing_is_cut():
    tiers = [{"guards": "x" * 30_000}]
    assert unpack_control(pack_report("tiers", tiers=tiers))["tiers"] == tiers


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not json",
        b"\xff\xfe",
        b"[]",
        b"1",
        b"null",
        b"{}",
        json.dumps({"kind": "x"}).encode(),
        json.dumps({"version": VERSION}).encode(),
        json.dumps({"version": VERSION + 1, "kind": "x"}).encode(),
        b"[" * 60_000,
    ],
    ids=lambda data: repr(data[:20]),
)
def test_given_bytes_that_are_no_control_message_when_unpacked_then_it_is_a_protocol_error(data):
    with pytest.raises(ProtocolError, match="control message"):
        unpack_control(data)

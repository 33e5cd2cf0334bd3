"""The JSON schema of a line of `records.jsonl`, made of the table of a frame's columns and that of events."""

import json
from typing import Any, Final

from torchperf_ros.api.alert import Level
from torchperf_ros.api.outcome import Fallback, GuardVerdict, Health, Outcome
from torchperf_ros.stage.frame_table import KEPT, MEANINGS

VERSION: Final = 1
_Json = dict[str, Any]

_TEXT: Final[_Json] = {"type": "string"}
_COUNT: Final[_Json] = {"type": "integer", "minimum": 0}
_YES_OR_NO: Final[_Json] = {"type": "boolean"}
_REAL: Final[_Json] = {"$ref": "#/$defs/known"}
_STAGE: Final[_Json] = {"$ref": "#/$defs/stage"}
_HEALTH: Final[_Json] = {"$ref": "#/$defs/health"}
# Columns that records of older versions do not have.
_ABSENT: Final = frozenset({"answer_ms", "check", "deadline_ms", "stale", "scene", "missing_inputs"})


def _said(what: _Json, description: str) -> _Json:
    return {**what, "description": description}


def _all(values: _Json) -> _Json:
    return {"type": "object", "additionalProperties": values}


def _or_null(kind: str) -> _Json:
    return {"type": [kind, "null"]}


def _frame() -> tuple[str, _Json, _Json]:
    columns = {name: _REAL if kind == "f8" else _COUNT for name, kind in KEPT if name != "t_ns"}
    columns |= {
        "tier": _or_null("string"),
        "outcome": {"enum": [outcome.word for outcome in Outcome]},
        "fallback": {"enum": [*(fallback.word for fallback in Fallback), None]},
        "check": {"enum": [*(verdict.word for verdict in GuardVerdict), None]},
        "stamp_ns": {"type": "integer"},
        "stale": _YES_OR_NO,
    }
    columns = {
        name: _said(what, MEANINGS[name]) if name in MEANINGS else what for name, what in columns.items()
    }
    always = {name: what for name, what in columns.items() if name not in _ABSENT}
    reason = "why it was not on time, or what the guard refused; then a traceback if there is one"
    shapes = (
        "of the model's inputs, as 1x3x480x640 1x6, cut after 48 characters; null: no worker has answered"
    )
    more = {
        "step": _said(_COUNT, "of an anytime model, whose outputs these are; or 0"),
        "input_shapes": _said(_or_null("string"), shapes),
        "batch": _said(_or_null("integer"), "first dimension of the model's first input"),
    }
    always |= {
        "stage": _STAGE,
        "reason": _said(_TEXT, reason),
        "profiled": _said(_YES_OR_NO, "whether a profiler was recording"),
    }
    return (
        "an answered frame; times in ms",
        always,
        {name: columns[name] for name in columns if name in _ABSENT} | more,
    )


_STARTED: Final[_Json] = {
    "type": "object",
    "required": ["name", "tiers", "budget_ms"],
    "properties": {
        "name": _TEXT,
        "tiers": {"type": "array", "items": _TEXT},
        "budget_ms": {"type": "number"},
        "trigger": _said(
            _or_null("string"), "topic of the input that it runs for, null where another stage gives it out"
        ),
        "output": _said(_TEXT, "topic"),
    },
}
_CANDIDATE_TEXTS: Final = ("pairs", "skipped", "differs", "refused", "failed")
# By kind: what it is, fields that each record of it has, and others.
_KINDS: Final[dict[str, tuple[str, _Json, _Json]]] = {
    "start": (
        "first line of each file, and of each run of the node",
        {"node": _TEXT, "versions": _all(_TEXT), "stages": {"type": "array", "items": _STARTED}},
        {},
    ),
    "frame": _frame(),
    "memory": ("once a second, MiB by the labels of /perf/memory_stats", {"values": _all(_REAL)}, {}),
    "candidate": (
        "every 10 s while a stage has another version of its model, as on /diagnostics",
        {
            "stage": _STAGE,
            "version": _said(_TEXT, "which serves"),
            "candidate": _said(_TEXT, "name and state of the one on trial"),
        },
        {f"candidate_{name}": _TEXT for name in _CANDIDATE_TEXTS},
    ),
    "health": ("a stage's state has changed", {"stage": _STAGE, "from": _HEALTH, "to": _HEALTH}, {}),
    "anomaly": (
        "an alert as /perf/anomaly has it; level OK: it is over",
        {
            "level": {"enum": [level.name for level in Level]},
            "name": _TEXT,
            "message": _TEXT,
            "values": _all(_TEXT),
        },
        {},
    ),
    "signals": (
        "once a second, what the watch judges; by name with its unit, see docs/watching.md",
        {"machine": _all(_REAL), "stages": _all(_all(_REAL))},
        {},
    ),
    "dropped": (
        "frames that were never answered, in the second before",
        {"stage": _STAGE, "superseded": _COUNT},
        {"stale": _said(_COUNT, "of older records: frames dropped as too old; now they have an answer")},
    ),
    "log": (
        "a line of the node's log",
        {"severity": {"enum": ["info", "warn", "error"]}, "text": _TEXT},
        {},
    ),
    "drops": (
        "records that were not written: by kind beyond its rate, lost on the way, or for want of a disk",
        {"records": {"type": "integer", "minimum": 1}, "by": _all({"type": "integer"})},
        {},
    ),
}


def schema() -> str:
    whole = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"torchperf_ros records, version {VERSION}",
        "description": "One JSON object per line of records.jsonl. Readers ignore kinds and fields that they do"
        " not know; a new version is announced by v.",
        "type": "object",
        "required": ["v", "kind", "t_ns"],
        "properties": {
            "v": {"const": VERSION},
            "kind": _TEXT,
            "t_ns": {
                "type": "integer",
                "description": "ROS time in ns: of a frame, when its answer was published",
            },
        },
        "$defs": {
            "known": {"type": ["number", "null"], "description": "null where unknown"},
            "stage": _said(_TEXT, "name of the stage"),
            "health": {"enum": [state.name for state in Health]},
        },
        "allOf": [
            {
                "if": {"properties": {"kind": {"const": kind}}},
                "then": {"description": text, "required": [*always], "properties": always | other},
            }
            for kind, (text, always, other) in _KINDS.items()
        ],
    }
    return json.dumps(whole, indent=2) + "\n"

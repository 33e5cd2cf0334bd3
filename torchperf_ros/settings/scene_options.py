"""The scenes of a stage: situations with tiers, packages and a budget of their own."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchperf_ros.settings.parameter import Parameter, check_all, declared, one_each, param, require

DEFAULT_SCENE = "default"
EMERGENCY_SCENE = "emergency"
_PREFIX = "scene."
# Index of the odometry among what scenes depend on.
#
# That of a topic that names the scene N is `ODOMETRY - N`.
ODOMETRY = -1
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_ANY_SPEED = 1000.0


@dataclass(frozen=True)
class SceneOptions:
    """One scene, checked. It holds while all that it states holds, or while the adapter names it.

    Attributes:
        tiers: indexes of the stage's tiers, from most to least accurate.
        budget_ms: 0 for that of the stage.
        topic: where a `std_msgs/String` names the scene; "" for none.
    """

    name: str
    tiers: tuple[int, ...] = param([""], "Tiers of the scene, from most to least accurate.")
    packages: tuple[str, ...] = param(
        [""], "A .pt2 file of each of them, as the stage's packages; '': none."
    )
    budget_ms: float = param(
        0.0, "Time in ms to answer its frames; 0: the stage's.", 0.0, 60_000.0, live=True
    )
    min_speed: float = param(0.0, "The scene begins at this speed in m/s.", 0.0, _ANY_SPEED, live=True)
    max_speed: float = param(_ANY_SPEED, "It ends above this speed in m/s.", 0.0, _ANY_SPEED, live=True)
    topic: str = param("", "Topic of std_msgs/String that names the scene; empty: none.")
    word: str = param("", "Its name in those messages; empty: the scene's own.")

    @property
    def by_speed(self) -> bool:
        return self.min_speed > 0.0 or self.max_speed < _ANY_SPEED


SCENE_PARAMETERS = declared(SceneOptions)


def scene_parameters(names: object) -> Iterator[Parameter]:
    """The parameters of the scenes of these names, as `scene.NAME.PARAMETER`.

    Nothing for what is no list of names.
    """
    for name in dict.fromkeys(_given(names)):
        for one in SCENE_PARAMETERS:
            yield replace(one, name=f"{_PREFIX}{name}.{one.name}")


def _given(names: object) -> list[str]:
    return [name for name in names if isinstance(name, str) and name] if isinstance(names, list) else []


def parse_scenes(
    stage: str,
    names: Sequence[str],
    values: Mapping[str, Any],
    tiers: Sequence[str],
    packages: Sequence[str],
) -> tuple[tuple[SceneOptions, ...], dict[str, str]]:
    """The scenes of a stage, `default` first, and the package of every tier, a scene's own at the end.

    `names` are of the scenes beside `default`, which has these `tiers` and their `packages`; `values` are
    those of the stage's parameters.

    Raises:
        ConfigError: names the parameter, the value, and what is allowed.
    """
    names = _given(list(names))
    good = all(_NAME.fullmatch(name) and name != DEFAULT_SCENE for name in names) and len(
        set(names)
    ) == len(names)
    where = f"{stage}.scenes: {names!r} is not allowed; it has to be"
    require(
        good,
        f"{where} a list of names, each once: lower-case letters, digits and _; default is there anyway",
    )
    package_of = dict(zip(tiers, packages, strict=True))
    scenes = [SceneOptions(DEFAULT_SCENE, tuple(range(len(tiers))), (), 0.0, 0.0, _ANY_SPEED, "", "")]
    for name in names:
        prefix = f"{stage}.{_PREFIX}{name}."
        found = check_all(SCENE_PARAMETERS, values, f"{stage}.", f"{_PREFIX}{name}.")
        own, given = found["tiers"], found["packages"]
        require(own and own[0], f"{prefix}tiers: is empty; scene {name} has to have at least one tier")
        once = all(own) and len(set(own)) == len(own)
        require(once, f"{prefix}tiers: {own!r} is not allowed; it has to be at least one name, each once")
        for tier, package in zip(own, one_each(given, own, f"{prefix}packages"), strict=True):
            before = package_of.setdefault(tier, package)
            text = (
                f"tier {tier} runs {before or 'no package'} in another scene; a tier with another package"
                " is another"
            )
            require(
                package in {"", before},
                f"{prefix}packages: {package!r} is not allowed: {text} tier, name it so",
            )
        least, most, budget_ms = found["min_speed"], found["max_speed"], found["budget_ms"]
        require(least < most, f"{prefix}min_speed: {least} is not below max_speed {most}")
        require(
            budget_ms == 0.0 or budget_ms >= 1.0,
            f"{prefix}budget_ms: {budget_ms} is not allowed; 0, or from 1 on",
        )
        order = list(package_of)
        scenes.append(
            SceneOptions(
                name,
                **found
                | {
                    "tiers": tuple(map(order.index, own)),
                    "packages": tuple(given),
                    "word": found["word"] or name,
                },
            )
        )
    return tuple(scenes), package_of


def is_of_scene(stage: str, given: str, names: object) -> bool:
    """Whether a given name is of the form `scene.NAME.PARAMETER`.

    Raises:
        ConfigError: it is, and the stage has no such scene, or a scene no such parameter.
    """
    if not given.startswith(_PREFIX):
        return False
    scenes, fields = _given(names), [one.name for one in SCENE_PARAMETERS]
    scene, _, name = given.removeprefix(_PREFIX).partition(".")
    listed = ", ".join(scenes) or "none"
    require(scene in scenes, f"{stage}.{given}: {stage}.scenes has no scene {scene!r}; it has {listed}")
    require(name in fields, f"{stage}.{given}: is unknown; a scene has {', '.join(fields)}")
    return True

"""Inputs that a stage synchronises with its trigger: lines INPUT slop MS offset MS wait MS, as parameters have."""

from collections.abc import Sequence
from dataclasses import dataclass

from torchperf_ros.config.parameter import require

MOST_MS = 60_000.0
_WORDS = {"slop": 0.0, "offset": -MOST_MS, "wait": 0.0}
"""What a line says of its input after its name, in any order, and the least that each may be."""
_FORM = "it has to be INPUT slop MS, then offset MS and wait MS where wanted, such as cloud slop 40 offset 0 wait 15"


@dataclass(frozen=True)
class SyncRule:
    """One line, checked.

    Attributes:
        topic: of the input, as the adapter names it.
        slop_ms: a message whose stamp is further from the one that is wanted is not used.
        offset_ms: that stamp less the trigger's; negative: an older message is wanted.
        wait_ms: a frame waits for it so long at most, counted from the trigger's receipt.
    """

    topic: str
    slop_ms: float
    offset_ms: float = 0.0
    wait_ms: float = 0.0

    def __str__(self) -> str:
        """As the parameter has it."""
        return f"{self.topic} slop {self.slop_ms:g} offset {self.offset_ms:g} wait {self.wait_ms:g}"


def parse_sync(stage: str, lines: Sequence[str], budgets_ms: Sequence[float]) -> tuple[SyncRule, ...]:
    """The rules of a stage; none may wait as long as the shortest of its budgets.

    Raises:
        ConfigError: names the line and what is allowed.
    """
    rules = tuple(_parse(f"{stage}.sync: {line!r}", line, min(budgets_ms)) for line in lines if line.strip())
    topics = [rule.topic for rule in rules]
    for topic in topics:
        require(
            topics.count(topic) == 1, f"{stage}.sync: {topic} stands in {topics.count(topic)} lines; it may have one"
        )
    return rules


def check_sync(stage: str, rules: Sequence[SyncRule], inputs: Sequence[tuple[str, bool]]) -> None:
    """See that every rule is for an input that can be synchronised.

    The trigger's type may have no stamp: what another stage gives out has that of its frame.

    `inputs` are those of the adapter, the trigger first: topic, and whether the message type has a stamp.

    Raises:
        ConfigError: names the rule and the inputs that there are.
    """
    trigger, stamped = inputs[0][0], dict(inputs[1:])
    known = ", ".join(stamped) or "none beside its trigger"
    for rule in rules:
        where = f"{stage}.sync: {str(rule)!r}"
        require(rule.topic != trigger, f"{where}: {trigger} is the trigger, with which the others are synchronised")
        require(rule.topic in stamped, f"{where}: the adapter has no input {rule.topic}; it has: {known}")
        what = f"the message type of {rule.topic} does not begin with a std_msgs/Header"
        require(stamped[rule.topic], f"{where}: {what}; messages without a stamp cannot be synchronised")


def _parse(where: str, line: str, budget_ms: float) -> SyncRule:
    topic, *rest = line.split()
    words, numbers = rest[::2], rest[1::2]
    require(len(words) == len(numbers), f"{where} is not allowed; {_FORM}")
    given: dict[str, float] = {}
    for word, text in zip(words, numbers, strict=True):
        require(word in _WORDS, f"{where}: {word!r} is not allowed; {_FORM}")
        require(word not in given, f"{where}: {word} stands there twice")
        given[word] = _number(text)
        # written so that NaN, which compares false, is refused
        allowed = _WORDS[word] <= given[word] <= MOST_MS
        require(allowed, f"{where}: {word} {text} is not allowed; it has to be from {_WORDS[word]:g} to {MOST_MS:g} ms")
    require("slop" in given, f"{where} is not allowed; {_FORM}")
    rule = SyncRule(topic, **{f"{word}_ms": value for word, value in given.items()})
    text = f"{where}: wait {rule.wait_ms:g} is not allowed; it has to be below the shortest budget, {budget_ms:g} ms"
    require(rule.wait_ms < budget_ms, text)
    return rule


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")

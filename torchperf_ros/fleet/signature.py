"""Signed plans: an Ed25519 key of the user's, one JSON file, and a reason for every file that is refused.

The signature is over `SIGNED` and the canonical JSON of the plan (sorted names, no spaces, UTF-8), so that
the file may be laid out anew, and any change of a value ends its validity. Ed25519: RFC 8032.
"""

import base64
import binascii
import datetime
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.fleet.plan import CLOCK_TOLERANCE_S, PlanError, RolloutPlan, plan_of
from torchperf_ros.settings.files import SMALL_BYTES, read_bounded

SIGNED: Final = b"torchperf_ros roll-out plan v1\n"
VERSION: Final = 1
_FIELDS: Final = {"v", "plan", "key", "signature"}


def make_keys(private: Path) -> Path:
    """Write a new private key, which only the user can read, and the public one beside it, `.pub`.

    Raises:
        ConfigError: one of them is there already, for a key that is gone cannot be made again; or cannot be
            written.
    """
    public = private.with_name(f"{private.name}.pub")
    for path in (private, public):
        if path.exists():
            raise ConfigError(
                f"key {path}: is there already; plans that it signed need it, name another file"
            )
    key = Ed25519PrivateKey.generate()
    text = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    try:
        with os.fdopen(os.open(private, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(text)
        public.write_bytes(
            key.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
        )
    except OSError as error:
        raise ConfigError(f"key {private}: cannot be written ({error.strerror or error})") from error
    return public


def _key_text(path: Path, read: Callable[[Path], bytes]) -> bytes:
    try:
        return read(path)
    except OSError as error:
        raise ConfigError(f"key {path}: cannot be read ({error.strerror or error})") from error


def read_private_key(path: Path) -> Ed25519PrivateKey:
    """The key that signs; raises `ConfigError` where the file is none."""
    try:
        key = form.load_pem_private_key(_key_text(path, Path.read_bytes), None)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"key {path}: is no private key that `torchperf rollout keygen` wrote ({error})"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"key {path}: is a {type(key).__name__}; it has to be an Ed25519 key")
    return key


def read_public_key(path: Path) -> Ed25519PublicKey:
    """The key that vehicles trust; raises `ConfigError` where the file is none."""
    try:
        key = form.load_pem_public_key(_key_text(path, read_bounded))
    except ValueError as error:
        raise ConfigError(
            f"key {path}: is no public key that `torchperf rollout keygen` wrote (.pub)"
        ) from error
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(f"key {path}: is a {type(key).__name__}; it has to be an Ed25519 key")
    return key


def sign(plan: RolloutPlan, key: Ed25519PrivateKey) -> str:
    """The signed plan as one JSON file, laid out so that changes can be reviewed."""
    values = plan.to_mapping()
    plan_of(values, "plan")  # what vehicles would refuse is not signed
    signature = base64.b64encode(key.sign(SIGNED + canonical(values))).decode()
    content = {"v": VERSION, "plan": values, "key": fingerprint(key.public_key()), "signature": signature}
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def read_signed(text: bytes, key: Ed25519PublicKey, where: str) -> RolloutPlan:
    """The plan in a signed file, whose signature is checked before anything else in it is looked at.

    Raises:
        PlanError: it is cut, malformed, not signed, signed with another key, was changed, or is no plan.
    """
    if len(text) > SMALL_BYTES:
        raise PlanError(f"{where}: has {len(text):,} bytes; a signed plan has at most {SMALL_BYTES:,}")
    try:
        content: Any = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise PlanError(
            f"{where}: is cut or malformed, no JSON ({error}); copy the signed file again"
        ) from error
    if not isinstance(content, dict) or "signature" not in content:
        raise PlanError(f"{where}: is not signed; `torchperf rollout sign` signs a plan")
    if set(content) != _FIELDS or content["v"] != VERSION:
        raise PlanError(
            f"{where}: is no signed plan of version {VERSION}: it has to have {', '.join(sorted(_FIELDS))}"
        )
    try:
        signature = base64.b64decode(content["signature"], validate=True)
        key.verify(signature, SIGNED + canonical(content["plan"]))
    except (InvalidSignature, binascii.Error, TypeError, ValueError) as error:
        if content["key"] != fingerprint(key):
            raise PlanError(
                f"{where}: is signed with the key {content['key']}; this vehicle trusts {fingerprint(key)} "
                "only"
            ) from error
        raise PlanError(
            f"{where}: its signature is not of this content: it was changed after it was signed"
        ) from error
    return plan_of(content["plan"], where)


def check_time(plan: RolloutPlan, now: datetime.datetime, where: str) -> None:
    """See that a plan is valid now, by a clock that may be `CLOCK_TOLERANCE_S` behind.

    Raises:
        PlanError: it is not yet, or no longer.
    """
    early = (plan.issued - now).total_seconds()
    if early > CLOCK_TOLERANCE_S:
        raise PlanError(
            f"{where}: is not valid yet: issued {plan.issued:%Y-%m-%d %H:%M} UTC, and this clock says "
            f"{now:%Y-%m-%d %H:%M}, {early / 60:,.0f} min before; {CLOCK_TOLERANCE_S / 60:.0f} min are "
            "tolerated. Is the clock set?"
        )
    if now > plan.expires:
        raise PlanError(
            f"{where}: expired {plan.expires:%Y-%m-%d %H:%M} UTC, and this clock says "
            f"{now:%Y-%m-%d %H:%M}; sign a new one"
        )


def canonical(values: object) -> bytes:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "surrogatepass")


def fingerprint(key: Ed25519PublicKey) -> str:
    """A short name of a key, to compare by eye."""
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()[:16]

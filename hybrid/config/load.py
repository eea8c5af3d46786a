"""A profile and its overrides become a `RunConfig`, or one error that lists everything wrong with them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from hybrid.config import algorithm_rules, file_rules, kind_rules, model_rules  # noqa: F401 (register their rules)
from hybrid.config.resolve import resolve
from hybrid.config.rules import find_violations
from hybrid.config.run import SECTIONS, RunConfig
from hybrid.config.violations import Violation, explain, unknown_section
from hybrid.errors import ConfigError, HybridError

COMMAND_LINE = "command line"

PLACEHOLDERS = {"model": {"path": "placeholder"}, "data": {"train": "placeholder"}, "train": {"steps": 1}}
"""Stand in for required keys while the rest of a broken profile is checked."""


class _Loader(yaml.SafeLoader):
    """YAML where 1e-6 is a number; YAML 1.1 asks for 1.0e-6."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)$"),
    list("-+0123456789."),
)


def load_run(profile: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> RunConfig:
    """Read `profile` and lay `section.key=value` overrides over it; values are YAML.

    Raises `ConfigError` with every violation: types, bounds, unknown keys, rules between fields. The rules are checked
    on the resolved values; what is returned is the config as written, with its `auto`: see `resolve`.
    """
    profile = Path(profile).expanduser()
    values, places, violations = _read_profile(profile)
    for override in overrides:
        violations += _apply(override, values, places)
    cfg, broken, more = _validate(values, profile, places)
    violations += more + find_violations(resolve(cfg), broken)
    if violations:
        raise ConfigError(_report(profile, violations, places))
    return cfg


def check(cfg: RunConfig) -> None:
    """Raise `ConfigError` when `cfg` breaks a rule between fields; for configs that did not come from a file."""
    check_report(cfg, find_violations(resolve(cfg), frozenset()))


def check_report(cfg: RunConfig, violations: list[Violation], error: type[HybridError] = ConfigError) -> None:
    """Raise `error` that lists `violations` of `cfg`, if there are any."""
    if violations:
        raise error(_report(cfg.profile, violations, cfg.places))


def dump(cfg: RunConfig) -> str:
    """`cfg` as a profile: YAML text that `load_run` reads back to the same values."""
    return yaml.dump(cfg.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def _read_profile(profile: Path) -> tuple[dict[str, Any], dict[str, str], list[Violation]]:
    """Values by section, the place of each key (`file:line`), and what is wrong with the file's form."""
    try:
        text = profile.read_text(encoding="utf-8")
    except OSError as error:
        near = sorted(str(p) for p in profile.parent.glob("*.yaml")) if profile.parent.is_dir() else []
        listing = f" Profiles there: {', '.join(near)}." if near else ""
        raise ConfigError(f"The profile {profile} cannot be read ({error.strerror}).{listing}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"The profile {profile} is not UTF-8 text: {error}") from error
    try:
        node = yaml.compose(text, Loader=_Loader)
        values = yaml.load(text, Loader=_Loader) or {}
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"The profile {profile} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"The profile {profile} must be a mapping of sections ({', '.join(SECTIONS)}), not {type(values).__name__}."
        )
    places: dict[str, str] = {}
    violations: list[Violation] = []
    _locate(node, "", profile, places, violations)
    optional = ("critic", "reference")
    values = {str(k): {} if v is None and str(k) not in optional else _text_keys(v) for k, v in values.items()}
    return values, places, violations


def _text_keys(section: Any) -> Any:
    """A section with keys as messages print them: YAML reads `1:` and `on:` as a number and a truth value."""
    return {str(key): value for key, value in section.items()} if isinstance(section, dict) else section


def _locate(
    node: yaml.Node | None, prefix: str, profile: Path, places: dict[str, str], violations: list[Violation]
) -> None:
    """Note the line of each key down to `section.key`, and keys that stand twice: YAML would take the last one in silence."""
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        place = f"{profile}:{key.start_mark.line + 1}"
        if name in places:
            violations.append(
                Violation((name,), f"{name} stands twice, at {places[name]} and {place}", "Keep one of them.")
            )
        places[name] = place
        if "." not in name:
            _locate(value, f"{name}.", profile, places, violations)


def _apply(override: str, values: dict[str, Any], places: dict[str, str]) -> list[Violation]:
    """Lay one override over `values`."""
    name, equals, text = override.partition("=")
    parts = name.strip().split(".")
    if not equals or not all(parts):
        fix = "Write section.key=value, for example train.steps=3; quote values with blanks."
        return [Violation((), f"override {override!r} has no section, key and value", fix)]
    try:
        value = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError):
        return [Violation((), f"the value of override {override!r} is not valid YAML", f"Quote it: {name}='\"...\"'.")]
    if len(parts) == 1 and parts[0] in SECTIONS and not (value is None or isinstance(value, dict)):
        return [Violation((), f"override {override!r} names a section without a key", f"Write {name}.key=value.")]
    target = values
    for part in parts[:-1]:
        if not isinstance(target.get(part), dict):
            target[part] = {}
        target = target[part]
    target[parts[-1]] = value
    places[".".join(parts[:2])] = COMMAND_LINE
    return []


def _validate(
    values: dict[str, Any], profile: Path, places: dict[str, str]
) -> tuple[RunConfig, frozenset[str], list[Violation]]:
    """The config of all that is right in `values`, the dotted keys that are not, and what is wrong with them."""
    violations = [unknown_section(name) for name in values if name not in SECTIONS]
    origin = {"profile_dir": profile.absolute().parent, "profile": profile, "places": places}
    kept = {name: value for name, value in values.items() if name in SECTIONS}
    for name in PLACEHOLDERS:
        kept.setdefault(name, {})
    try:
        return RunConfig.model_validate({**kept, **origin}), frozenset(), violations
    except ValidationError as error:
        errors = error.errors(include_url=False)
    broken = frozenset(".".join(map(str, e["loc"][:2])) for e in errors)
    violations += explain(errors)
    for name in list(kept):
        if name in broken:
            del kept[name]
        elif isinstance(kept[name], dict):
            kept[name] = {k: v for k, v in kept[name].items() if f"{name}.{k}" not in broken}
    for name, keys in PLACEHOLDERS.items():
        kept[name] = {**keys, **kept.get(name, {})}
    return RunConfig.model_validate({**kept, **origin}), broken, violations


def _report(profile: Path, violations: list[Violation], places: dict[str, str]) -> str:
    count = "one problem" if len(violations) == 1 else f"{len(violations)} problems"
    lines = [f"{profile}: {count}"]
    for number, violation in enumerate(violations, 1):
        where = ", ".join(dict.fromkeys(places[key] for key in violation.keys if key in places))
        lines += [f"  {number}. {violation.rule}" + (f"  ({where})" if where else ""), f"     {violation.fix}"]
    return "\n".join(lines)

"""Imports point down: a file imports its own package and packages on strictly lower floors."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = {
    "agentrt.core": 0,
    "agentrt.report": 1, "agentrt_kernels": 1, "agentrt_tools": 1,
    "agentrt.engine": 2, "agentrt.sandbox": 2,
    "agentrt.env": 3,
    "agentrt.rollout": 4,
    "agentrt.testing": 5, "agentrt.sim": 5, "agentrt.serve": 5, "agentrt.cluster": 5,
    "agentrt.cli": 6,
    "agentrt.__main__": 7,
    "agentrt_envs": 7,
}  # fmt: skip
FACADE = ("agentrt.core", "agentrt.env")
"""What `agentrt/__init__.py` gives to users; importing `agentrt` is importing these."""
ALONE = ("agentrt_kernels", "agentrt_tools")
"""These know nothing of agentrt."""
APART = ("agentrt.env", "agentrt.rollout", "agentrt.testing")
"""These see an engine only through agentrt.core.protocol."""
EXCEPT = ("agentrt.testing.toy", "agentrt.testing.copier")
"""A toy model and its host tier are made for the engine's own tests."""


def package_of(module: str) -> str | None:
    """The floor's package that a module belongs to; None for one of somebody else's."""
    parts = module.split(".")
    if parts[0] != "agentrt":
        return parts[0] if parts[0] in FLOORS else None
    return ".".join(parts[:2]) if len(parts) > 1 else "agentrt"


def sources() -> Iterator[Path]:
    for folder in ("agentrt", "kernels/agentrt_kernels", "tools/agentrt_tools", "envs/agentrt_envs"):
        yield from sorted((ROOT / folder).rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "agentrt" else parts[1:]).removesuffix(".__init__")


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, anywhere in it, also under TYPE_CHECKING and inside functions."""
    here = module_of(path).split(".")
    package = here if path.name == "__init__.py" else here[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            is_package = module == "agentrt" and node.module is not None
            names = [f"{module}.{alias.name}" for alias in node.names]
            yield from (name if is_package and name in FLOORS else module for name in names)


def may_import(module: str, name: str) -> bool:
    own, other = str(package_of(module)), package_of(name)
    if other is None or other == own:
        return True
    if own == "agentrt":
        return other in FACADE
    if own in ALONE or (other == "agentrt.engine" and own in APART and module not in EXCEPT):
        return False
    return all(FLOORS[below] < FLOORS[own] for below in (FACADE if other == "agentrt" else (other,)))


def violations(path: Path) -> list[str]:
    """What a file imports and must not."""
    module = module_of(path)
    return [f"{module} imports {name}" for name in imports(path) if not may_import(module, name)]


@pytest.mark.parametrize("path", list(sources()), ids=module_of)
def test_imports_point_down(path: Path) -> None:
    assert violations(path) == []


def test_every_package_has_a_floor() -> None:
    packages = {package_of(module_of(path)) for path in sources()}
    assert packages - {"agentrt"} <= set(FLOORS)


def test_the_guard_sees_a_wrong_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    bad = tmp_path / "agentrt" / "rollout" / "bad.py"
    bad.parent.mkdir(parents=True)
    bad.write_text("def f():\n    from agentrt.engine import step\nfrom agentrt import cli\nfrom ..core import spec\n")
    assert violations(bad) == ["agentrt.rollout.bad imports agentrt.cli", "agentrt.rollout.bad imports agentrt.engine"]

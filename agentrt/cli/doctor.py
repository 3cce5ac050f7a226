"""`agentrt doctor`: what this machine gives, what agentrt found in it, and how to get what is missing."""

import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, NamedTuple

import msgspec
import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from agentrt.cli.console import results
from agentrt.cli.isolation import report
from agentrt.core.errors import AgentrtError
from agentrt.core.models import PULLABLE, cache_folder, find_model
from agentrt.core.tokenizer import Tokenizer
from agentrt.env import registry

EXTRAS = {
    "flashinfer": ("flashinfer-python", "engine.attention=flashinfer, on a GPU"),
    "gguf": ("gguf", "agentrt pull"),
    "gym": ("reasoning-gym", "the environments reasoning_gym:NAME"),
    "hub": ("huggingface_hub", "--model org/name"),
    "mcp": ("mcp", "tools of MCP servers"),
    "parquet": ("pyarrow", "agentrt export --to parquet"),
    "ray": ("ray", "agentrt run --ray ADDRESS"),
    "remote": ("httpx", "agentrt run --engine URL"),
    "serve": ("starlette", "agentrt serve"),
    "sim": ("trio", "agentrt sim, agentrt replay"),
    "transformers": ("transformers", "models of families that our own decoder does not know"),
}
"""Each optional part: the package it needs, and what it is for."""
PACKAGES = ("agentrt", "torch", "numba", "numpy", "tokenizers", "safetensors", "anyio", "msgspec")


class Finding(NamedTuple):
    """One line: what it is about, what was found, and the fix if something is missing."""

    about: str
    found: str
    fix: str = ""


def doctor(
    model: Annotated[str, typer.Option(help="The model whose shapes are tried.")] = "sprout",
    template: Annotated[
        str | None, typer.Option(help="Explain how the chat template of this model, or model folder, is handled.")
    ] = None,
    sandbox: Annotated[
        bool, typer.Option("--sandbox", help="Explain how tools are isolated here, and why so.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Say what this machine gives, and how to get what is missing.

    Examples:

    [cyan]agentrt doctor[/cyan]

    [cyan]agentrt doctor --sandbox[/cyan]

    [cyan]agentrt doctor --template smollm2-135m[/cyan]
    """
    if sandbox:
        from agentrt.sandbox.probe import shared  # here, as it is below

        results().print(report(shared().isolation), markup=False, soft_wrap=True)
        return
    if template is not None:
        results().print(_explained(template), markup=False, soft_wrap=True)
        return
    findings = [*_machine(), *_engine(model), *_sandbox(), *_kernels(), *_extras(), *_names()]
    if as_json:
        print(msgspec.json.encode([finding._asdict() for finding in findings]).decode())
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for finding in findings:
        table.add_row(escape(finding.about), escape(finding.found))
        if finding.fix:
            table.add_row("", f"[yellow]→ {escape(finding.fix)}[/yellow]")
    results().print(table)


def _explained(model: str) -> Text:
    """Joining ids, what the template rewrites, and a small conversation with its mask in colour."""
    from agentrt.env.chat.choose import chat_template, renderer_for, renderer_of  # here, because these take a while
    from agentrt.env.chat.explain import explain
    from agentrt.env.chat.template import Template

    folder = find_model(model)
    tokenizer = Tokenizer.load(folder)
    source, variables = chat_template(folder)
    own = Template(source, tokenizer, variables=variables) if source is not None else None
    renderer = renderer_of(own) if own is not None else renderer_for(folder, tokenizer)
    return Text.from_ansi(explain(renderer, own, colour=sys.stdout.isatty()))


def _machine() -> Iterator[Finding]:
    import torch

    yield Finding("python", f"{platform.python_version()}, {platform.system()} {platform.release()}, {sys.executable}")
    yield Finding("packages", ", ".join(f"{name} {version(name)}" for name in PACKAGES))
    yield Finding("processor", f"{os.cpu_count()} cores, {torch.get_num_threads()} torch threads")
    if torch.cuda.is_available():
        yield Finding("gpu", ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())))
    else:
        yield Finding("gpu", "none that torch can use", "engine.device stays cpu; for a GPU install torch with CUDA")


def _engine(model: str) -> Iterator[Finding]:
    """How a model's weights are kept on the CPU."""
    from agentrt.engine.model.config import NotDecodedError, load_config
    from agentrt.engine.model.decoder import packed_type_of
    from agentrt.engine.model.loader import read_weights

    try:
        folder = find_model(model)
        config = load_config(folder)
        packed = packed_type_of(config, read_weights(folder, config))
    except NotDecodedError:
        yield Finding("model", f"{model}: not of our decoder's families", "it may run as transformers' module: try it")
        return
    except AgentrtError as error:
        yield Finding("model", f"{model}: not usable", str(error))
        return
    name = str(packed).removeprefix("torch.")
    yield Finding("linear layers", f"{name} weights, float32 sums ({model})")


def _sandbox() -> Iterator[Finding]:
    from agentrt.sandbox.probe import shared

    try:
        isolation = shared().isolation
    except AgentrtError as error:
        yield Finding("sandbox", "no tool can run", str(error))
        return
    yield Finding("sandbox", isolation.line, "; ".join(isolation.fixes))
    for reason in isolation.reasons:
        yield Finding("", f"{reason} (more: agentrt doctor --sandbox)")


def _kernels() -> Iterator[Finding]:
    from agentrt_kernels.layers.cpu import compiled_in

    if folder := compiled_in():
        yield Finding("kernels", f"compiled, in {folder}")
    else:
        yield Finding("kernels", "not compiled yet", "the first run compiles them, for up to a minute")


def _extras() -> Iterator[Finding]:
    for extra, (package, use) in EXTRAS.items():
        try:
            yield Finding(f"[{extra}]", f"{package} {version(package)}: {use}")
        except PackageNotFoundError:
            yield Finding(f"[{extra}]", f"{package} is missing: {use}", f"pip install 'agentrt[{extra}]'")


def _names() -> Iterator[Finding]:
    yield Finding("environments", ", ".join(registry.names()))
    for name in PULLABLE:
        folder = cache_folder() / name
        if folder.is_dir():
            yield Finding("model", f"{name}: pulled, {folder}")
        else:
            yield Finding("model", f"{name}: not here", f"agentrt pull {name}")

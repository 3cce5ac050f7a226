"""What a run is asked to do: frozen structs, closed to unknown keys, read straight from TOML.

`RunSpec` is the whole of it. A file gives it (`load_toml`, `run_spec`), dotted overrides change it (`override`), and
`run.toml` in the run folder keeps it.
"""

import difflib
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from datetime import date, datetime, time
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec

from agentrt.core.errors import UsageError

T = TypeVar("T")

UNBOUNDED = "unbounded"
"""How a limit of None is spelt in TOML, which has no word for it."""


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The law that a token is drawn from, and what ends a turn. How many tokens a turn may have is a limit, not a law.

    Applied in this order: bias, penalties, masks (bad words, end ids before `min_tokens`, what a grammar forbids, ids
    that the tokenizer does not know), temperature, min-p, top-k, renormalise, top-p, renormalise.
    """

    temperature: float = 1.0
    """0 (anything below 1e-5) takes the most likely id; its recorded logprob is the untempered one."""
    top_k: int = 0
    """Keep the k most likely ids; 0 and -1 mean off."""
    top_p: float = 1.0
    """Keep the smallest set of most likely ids whose probability reaches top_p; 1 means off."""
    min_p: float = 0.0
    """Drop ids less likely than min_p times the most likely one; 0 means off."""
    repetition_penalty: float = 1.0
    """Divide (multiply, if negative) the logit of every id seen in prompt or output; 1 means off."""
    presence_penalty: float = 0.0
    """Subtract from the logit of every id in this turn's output."""
    frequency_penalty: float = 0.0
    """Subtract for each time the id is in this turn's output."""
    logit_bias: dict[int, float] = {}
    """Add to the logits of these ids; -inf is spelt -1e9."""
    min_tokens: int = 0
    """No end id may be sampled before this many tokens of the turn."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of ids that no turn may hold: the last id of one is masked after the others."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a turn; the renderer adds its family's end-of-turn id."""
    stop: tuple[str, ...] = ()
    """Strings that end a turn; the id that completes one is kept."""
    top_logprobs: int = 0
    """Also say the logprobs of this many most likely ids at each sampled one (`Completion.top_logprobs`)."""

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"sampling.{name} must be a finite number, not {getattr(self, name)}")
        if self.temperature < 0:
            raise ValueError(f"sampling.temperature must be 0 or more, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampling.top_p must be in (0, 1], not {self.top_p}; 1 means off")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"sampling.min_p must be in [0, 1], not {self.min_p}; 0 means off")
        if not -1 <= self.top_k < 2**31:
            raise ValueError(f"sampling.top_k must be positive and below 2^31, or 0 for off, not {self.top_k}")
        if self.repetition_penalty <= 0:
            raise ValueError(f"sampling.repetition_penalty must be above 0, not {self.repetition_penalty}; 1 means off")
        if self.min_tokens < 0:
            raise ValueError(f"sampling.min_tokens must be 0 or more, not {self.min_tokens}")
        if self.top_logprobs < 0:
            raise ValueError(f"sampling.top_logprobs must be 0 or more, not {self.top_logprobs}")
        if not all(map(math.isfinite, self.logit_bias.values())):
            raise ValueError("sampling.logit_bias holds a number that is not finite; -inf is spelt -1e9")
        if any(not ids for ids in self.bad_words):
            raise ValueError("sampling.bad_words holds an empty sequence; give the ids of each word")
        if any(not text for text in self.stop):
            raise ValueError("sampling.stop holds an empty string, which would end every turn at once")
        if any("\ud800" <= character <= "\udfff" for character in "".join(self.stop)):
            raise ValueError("sampling.stop holds half a character (a lone surrogate), which no text does")


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Budgets of one episode; None means unbounded."""

    max_turns: int | None = 16
    max_turn_tokens: int = 512
    """Sampled ids in one turn. A turn that reaches it is cut, and a cut turn runs no tool."""
    max_episode_tokens: int | None = None
    """Sampled ids of the whole episode, over all its branches."""
    max_tool_calls: int | None = None
    max_idle_turns: int | None = 4
    """Turns in a row without progress: every call of the turn failed or repeats an earlier one."""
    wall_seconds: float | None = 600.0
    """From the first turn to the last; the partial trajectory is kept."""
    turn_seconds: float | None = None
    """One model turn, its wait in the engine's queue included. An engine that takes longer has failed."""
    tool_seconds: float = 20.0
    """One tool call."""
    score_seconds: float = 60.0
    """Scoring one episode: all its rewards and metrics together."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not (0 < value < math.inf):
                raise ValueError(f"limits.{name} must be above 0, not {value}")
        for name in ("turn_seconds", "tool_seconds"):
            inner = getattr(self, name)
            if None not in (inner, self.wall_seconds) and inner > self.wall_seconds:
                raise ValueError(
                    f"limits.{name} ({inner:g}) is longer than limits.wall_seconds ({self.wall_seconds:g}), which "
                    "encloses it; lower the first or raise the second"
                )


Verifier = Literal["coupled", "rejection", "block"]


KVPolicy = Literal["priced", "lru", "lru_drop", "ttl", "cache_ttl", "infercept"]
"""What costs least; least recently used first, to the host; the same, computed again; kept for a time after its tool has
started; the rules of Continuum and InferCept, to compare with."""


ServiceOrder = Literal["arrival", "synchronous", "asynchronous"]
WeightPrecision = Literal["auto", "fp16", "int8"]
KVPrecision = Literal["auto", "fp16", "int8"]


CPU_KV_TOKENS = 65_536


class EngineSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The engine: in this process, or on servers."""

    urls: tuple[str, ...] = ()
    """Servers that run the model (`agentrt serve`, vLLM, SGLang, others that return token ids). The rest is theirs then."""
    api_key_file: str = ""
    """A file that holds the servers' API key. The key itself is kept out of run.toml."""
    engines: int = 1
    """So many of them on this machine, each in a process of its own and, on `cuda`, on a GPU of its own; turns are placed
    as on servers. The rest is what each of them has."""
    device: str = "cpu"
    page_size: int = 16
    """Tokens in one page of KV."""
    kv_tokens: int | Literal["auto"] = "auto"
    """Room for KV on the device, in tokens. `auto` is 65,536 on the CPU; on a GPU what is free there, less room for new
    weights beside the present ones and for what a step computes."""
    max_batch: int = 64
    """Sequences that decode in one step."""
    step_tokens: int = 512
    """Rows in one step: decodes first, the rest for prompt chunks."""
    debug: bool = False
    """Whenever nothing runs, account for every page; what is lost or held twice ends the run as a bug. Sum up every page
    that is copied to the host, and use none that comes back with another sum."""
    host_tokens: int | Literal["auto"] = "auto"
    """Room for KV on the host, in tokens, for conversations whose tools run; 0 is none. `auto` is four times `kv_tokens` if
    that takes no more than a quarter of the memory that is free, else as many as do."""
    kv_policy: KVPolicy = "lru"
    """Which conversations keep their KV when pages are needed (`agentrt.engine.kv.policy`)."""
    kv_ttl_seconds: float = 2.0
    """How long the policy `ttl` keeps a conversation's KV on the device after its tool has started."""
    order: ServiceOrder = "arrival"
    """Whose turns are served first: who came first; for a trainer that waits for all, who has most left; for one that takes
    groups as they become whole, the oldest policy version, then the group with the fewest members left."""
    weights: WeightPrecision = "auto"
    """In what the CPU keeps the weights. `auto` changes none by more than 2^-25, so a trainer's float32 stays float32; `fp16`
    rounds them to float16; `int8` rounds them and each row that they are multiplied with, but for the output layer."""
    kv: KVPrecision = "auto"
    """In what the CPU keeps KV. `auto` rounds nothing. `fp16` takes half the room and makes batches faster; a request whose
    keys or values exceed 65504 fails. `int8` takes a fourth, rounds each head's keys and values, and costs time."""
    attention: Literal["auto", "flashinfer"] = "auto"
    """On a GPU, whose attention serves steps with prompt chunks: ours, or FlashInfer's (extra `flashinfer`)."""
    speculate: Literal["off", "auto"] = "off"
    """Whether ids are proposed and several verified in one step; with auto wherever that was measured to pay."""
    draft: str = ""
    """A model that drafts, beside what is drafted from text: an EAGLE-3 or MTP head or a small model, by name or folder."""
    verifier: Verifier = "coupled"
    """How a draft is judged. All are exact; with `coupled` the text is the same as without speculation."""
    draft_length: int = 8
    """Ids that are proposed at a time, at most."""
    draft_branches: int = 1
    """Ways that a draft may go on from one id, where texts disagree or a draft model has a second choice. A draft does not
    become longer by it: it takes what is likeliest to stand of all its branches."""

    def __post_init__(self) -> None:
        for name in ("engines", "page_size", "max_batch", "step_tokens", "draft_length", "draft_branches"):
            if getattr(self, name) < 1:
                raise ValueError(f"engine.{name} must be above 0, not {getattr(self, name)}")
        if self.kv_tokens != "auto" and self.kv_tokens < 1:
            raise ValueError(f"engine.kv_tokens must be above 0, not {self.kv_tokens}")
        if self.engines > 1 and self.urls:
            raise ValueError(
                "engine.engines starts engines on this machine and engine.urls names others; give one of them"
            )
        if self.host_tokens != "auto" and self.host_tokens < 0:
            raise ValueError(f"engine.host_tokens must be 0 or more, not {self.host_tokens}; 0 means no host tier")
        if not 0 <= self.kv_ttl_seconds < math.inf:
            raise ValueError(f"engine.kv_ttl_seconds must be 0 or more, not {self.kv_ttl_seconds}")
        if self.pool_tokens < self.page_size:
            raise ValueError(
                f"engine.kv_tokens ({self.pool_tokens}) holds not even one page of {self.page_size} tokens"
            )
        if self.draft_branches > 1 and self.verifier == "block":
            raise ValueError(
                "engine.verifier=block judges drafts of one branch; set engine.draft_branches to 1, or take coupled"
            )
        if self.step_tokens < self.max_batch:
            raise ValueError(
                f"engine.step_tokens ({self.step_tokens}) is below engine.max_batch ({self.max_batch}): "
                "a step must have a row for every decoding sequence"
            )

    @property
    def pool_tokens(self) -> int:
        """`kv_tokens` as a number: where nobody has looked at a device, that of the CPU."""
        return CPU_KV_TOKENS if self.kv_tokens == "auto" else self.kv_tokens


Purpose = Literal["run", "eval"]


class SandboxSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How tools are kept apart from everything else. The strongest level that works here is in force in any case."""

    allow_weak: bool = False
    """Let tools that ask for isolation run with limits only, where nothing better works. They can read your files."""


class RunSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A whole run. Two runs with the same spec on the same machine sample the same ids."""

    environment: str
    """A name (`calculator`), a module path (`pkg.module`) or a file (`my_env.py`)."""
    environment_args: dict[str, Any] = {}
    """Keyword arguments of the environment's class."""
    model: str = "sprout"
    """A name, a folder, or org/name of a model on the Hugging Face hub."""
    purpose: Purpose = "run"
    """The command that it is for: records of an evaluation are never mixed with others."""
    split: str = "train"
    groups: int = 4
    """Tasks: the first N of the split in an order fixed by the seed."""
    group_size: int = 4
    """Episodes of each task."""
    seed: int = 0
    max_concurrent: int = 64
    """Episodes alive at one time."""
    max_scoring: int = 16
    """Episodes scored at one time; waiting to be scored is not charged to `limits.score_seconds`."""
    sampling: SamplingParams = SamplingParams()
    limits: Limits = Limits()
    engine: EngineSpec = EngineSpec()
    sandbox: SandboxSpec = SandboxSpec()

    def __post_init__(self) -> None:
        for name in ("groups", "group_size", "max_concurrent", "max_scoring"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")


def run_spec(data: Mapping[str, Any], where: str) -> RunSpec:
    """`data`, as TOML has it, as a `RunSpec`. `UsageError` as `convert`."""
    limits = data.get("limits")
    if isinstance(limits, Mapping):
        data = {**data, "limits": {name: None if value == UNBOUNDED else value for name, value in limits.items()}}
    return convert(data, RunSpec, where)


def to_toml(spec: RunSpec) -> dict[str, Any]:
    """The tables that `run_spec` makes `spec` of."""
    data: dict[str, Any] = msgspec.to_builtins(spec, str_keys=True, builtin_types=(datetime, date, time))
    data["limits"] = {name: UNBOUNDED if value is None else value for name, value in data["limits"].items()}
    return data


def convert(data: Mapping[str, Any], kind: type[T], where: str) -> T:
    """`data` as a `kind`, or a `UsageError` of one sentence that names `where`, the key and, if it is near one, the fix."""
    try:
        return msgspec.convert(data, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {_explain(str(error), kind)}") from error


def load_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file, or a `UsageError` that names the line."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file; give the path of a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error


def override(data: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """`data` with each `dotted.key=value` applied; the value is read as TOML, and as a plain string if it is none."""
    result = dict(data)
    for assignment in assignments:
        dotted, separator, text = assignment.partition("=")
        keys = [key.strip() for key in dotted.split(".")]
        if not separator or not all(keys):
            raise UsageError(f"--set {assignment}: expected dotted.key=value, for example --set limits.max_turns=8")
        table = result
        for key in keys[:-1]:
            inner = table.get(key, {})
            if not isinstance(inner, dict):
                raise UsageError(f"--set {assignment}: {key} is a value, not a table of values")
            table[key] = dict(inner)
            table = table[key]
        table[keys[-1]] = _toml_value(text)
    return result


def nearest(name: str, valid: Iterable[str]) -> str:
    """`did you mean 'x'?` if one of `valid` is near `name`, else a list of them: the tail of an error sentence."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(names)}" if names else "there are none"


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        return text


def _explain(message: str, kind: Any) -> str:
    """msgspec's message in our words: `unknown key limits.max_turn; did you mean 'max_turns'?`."""
    message = message.replace("null", UNBOUNDED)
    message, _, path = message.partition(" - at `$")
    keys = [key for key in re.split(r"[.\[\]]+", path.rstrip("`")) if key]
    where, kind = ".".join(keys), _type_at(kind, keys)
    if unknown := re.search(r"unknown field `(.+)`", message):
        valid = [field.name for field in msgspec.structs.fields(kind)]
        return f"unknown key {'.'.join([*keys, unknown[1]])}; {nearest(unknown[1], valid)}"
    if invalid := re.search(r"Invalid enum value '(.+)'", message):
        return f"{where}: there is no {invalid[1]!r}; {nearest(invalid[1], _words(kind))}"
    return message if message.startswith(where) else f"{where}: {message}"


def _type_at(kind: Any, keys: Iterable[str]) -> Any:
    """What a key of a key of a struct is."""
    for key in keys:
        fields = msgspec.structs.fields(kind) if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else ()
        kind = next((field.type for field in fields if field.name == key), kind)
    return kind


def _words(kind: Any) -> list[str]:
    """What a value may be, of which some are words: `auto`, `int`."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [word for one in get_args(kind) for word in _words(one)] or [kind.__name__]

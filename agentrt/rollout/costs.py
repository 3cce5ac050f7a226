"""`KVCosts`: what an episode's KV came to, in all and by tool."""

from collections import defaultdict

from agentrt.core.protocol import Completion


class KVCosts:
    """Sums over the completions of one episode."""

    __slots__ = ("_by_tool", "_sums")

    def __init__(self) -> None:
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._by_tool: defaultdict[str, float] = defaultdict(float)

    def add(self, completion: Completion, tool: str) -> None:
        """Add one turn. `tool` ran before it, since the turn before of the same branch; "" if none did."""
        kv = completion.kv
        after = {"tokens_reprefilled": kv.reprefilled_tokens, "wait_seconds": kv.wait_seconds}
        self._sums["tokens_cached"] += completion.cached_tokens
        self._sums["tokens_prefilled"] += completion.context_tokens - completion.cached_tokens
        self._add(
            self._sums, "", device_byte_seconds=kv.device_byte_seconds, host_byte_seconds=kv.host_byte_seconds, **after
        )
        if tool:
            device, host = kv.tool_device_byte_seconds, kv.tool_host_byte_seconds
            self._add(self._by_tool, f"{tool}/", device_byte_seconds=device, host_byte_seconds=host, **after)

    def record(self) -> dict[str, float]:
        """As it is stored, without what is 0: what is of one tool has the name `TOOL/NAME`."""
        costs = {name: value for name, value in (*self._sums.items(), *self._by_tool.items()) if value}
        return {"tokens_cached": 0, "tokens_prefilled": 0} | costs

    @staticmethod
    def _add(sums: defaultdict[str, float], prefix: str, **values: float) -> None:
        for name, value in values.items():
            sums[prefix + name] += value

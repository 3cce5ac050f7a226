"""The policy that a spec names."""

from agentrt.core.spec import EngineSpec
from agentrt.engine.kv.baselines import CacheTtl, InferCept
from agentrt.engine.kv.policy import FixedTtl, Lru, Policy
from agentrt.engine.kv.priced import Priced


def make_policy(spec: EngineSpec) -> Policy:
    """The one that `spec.kv_policy` names."""
    match spec.kv_policy:
        case "priced":
            return Priced()
        case "lru":
            return Lru()
        case "lru_drop":
            return Lru(uses_host=False)
        case "ttl":
            return FixedTtl(spec.kv_ttl_seconds)
        case "cache_ttl":
            return CacheTtl()
        case "infercept":
            return InferCept()

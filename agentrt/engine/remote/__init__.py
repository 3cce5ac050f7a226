"""Engines on servers (agentrt serve, vLLM, SGLang, others that return token ids) behind `agentrt.core.protocol`."""

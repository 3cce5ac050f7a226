"""An OpenAI-compatible endpoint over an engine, which records the exact tokens of each session."""

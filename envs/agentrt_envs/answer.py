"""The final answer that some environments ask for: a last line `Answer: VALUE`."""


def grade(content: str, value: str) -> float:
    """1.0 iff the last line is `Answer: VALUE` and the word is not said twice."""
    last_line = content.rstrip().rpartition("\n")[2]
    return float(last_line == f"Answer: {value}" and content.count("Answer:") == 1)

"""Search: the lines of the episode's documents that say most of what is asked.

Run as `python -I -S search.py`, with `{"query": "harbour of Keb"}` as one JSON line on standard input; answers
`{"result": "..."}` or `{"error": "..."}` as one JSON line on the file descriptor in AGENTRT_REPLY_FD (standard output
without it). Documents are the `.txt` and `.md` files below the working directory, and each of their lines is a passage.
The result is the best passage, or the `limit` best ones, one a line.

Passages are ranked by BM25 over words, case aside. Words before a passage's first colon are its title and count three
times. Equal scores keep the order of files and lines. Links are not followed and at most 8 million characters are read.
"""

import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

ENDINGS = (".txt", ".md")
MAX_CHARACTERS = 8_000_000
MAX_LIMIT = 20
TITLE_WEIGHT = 3
SATURATION, LENGTH = 1.2, 0.75
"""BM25's k1 and b, at their usual values."""

_WORD = re.compile(r"\w+")


class SearchError(ValueError):
    """The search cannot be done; the message says why."""


def answer(call: dict[str, object], folder: str = ".") -> str:
    """Do one call on the documents below `folder`. Raises `SearchError`."""
    query, limit = call.get("query"), call.get("limit", 1)
    if not isinstance(query, str) or not _WORD.search(query):
        raise SearchError("query is missing or has no word")
    if not isinstance(limit, int) or not 1 <= limit <= MAX_LIMIT:
        raise SearchError(f"limit is a number from 1 to {MAX_LIMIT}")
    passages = list(read(folder))
    if not passages:
        raise SearchError("there are no documents")
    return "\n".join(best(query, passages, limit)) or "nothing found"


def best(query: str, passages: Sequence[str], limit: int) -> list[str]:
    """The passages that match `query`, best first, `limit` at most."""
    counts = [_counted(passage) for passage in passages]
    lengths = [sum(words.values()) for words in counts]
    usual = sum(lengths) / len(lengths) or 1.0
    scores = [0.0] * len(passages)
    for word in dict.fromkeys(words_of(query)):
        having = [index for index, words in enumerate(counts) if word in words]
        rarity = math.log(1 + (len(passages) - len(having) + 0.5) / (len(having) + 0.5))
        for index in having:
            count = counts[index][word]
            damping = SATURATION * (1 - LENGTH + LENGTH * lengths[index] / usual)
            scores[index] += rarity * count * (SATURATION + 1) / (count + damping)
    ranked = sorted((-score, index) for index, score in enumerate(scores) if score > 0)
    return [passages[index] for _, index in ranked[:limit]]


def read(folder: str) -> Iterator[str]:
    """Every line with a word in it, by file name and line. Raises `SearchError` if there is too much."""
    left = MAX_CHARACTERS
    for path, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            file = os.path.join(path, name)
            if not name.endswith(ENDINGS) or os.path.islink(file) or not os.path.isfile(file):
                continue
            with open(file, encoding="utf-8", errors="replace") as lines:
                text = lines.read(left + 1)
            left -= len(text)
            if left < 0:
                raise SearchError(f"the documents are longer than {MAX_CHARACTERS} characters")
            yield from (line.strip() for line in text.splitlines() if _WORD.search(line))


def words_of(text: str) -> list[str]:
    """The words of a text, lower case."""
    return _WORD.findall(text.lower())


def _counted(passage: str) -> Counter[str]:
    title, colon, _ = passage.partition(":")
    counts = Counter(words_of(passage))
    if colon:
        for word in words_of(title):
            counts[word] += TITLE_WEIGHT - 1
    return counts


def main() -> None:
    """Read the call, write the reply."""
    try:
        reply = {"result": answer(json.loads(sys.stdin.readline()))}
    except (SearchError, OSError) as error:
        reply = {"error": str(error)}
    except (ValueError, AttributeError):
        reply = {"error": 'expected one JSON line like {"query": "harbour of Keb"}'}
    line = json.dumps(reply) + "\n"
    with open(int(os.environ.get("AGENTRT_REPLY_FD", "1")), "w", encoding="utf-8") as output:
        output.write(line)


if __name__ == "__main__":
    main()

"""The tool of examples/own_tool.py: a program that reads one JSON line and writes one. Standard library only.

It runs in the episode's folder, so what one call writes there the next call reads.
"""

import json
import os
import random
import sys

ROLL = "roll.json"


def answer(op: str) -> str:
    if op == "roll":
        dice = [random.randint(1, 6) for _ in range(3)]
        with open(ROLL, "w") as file:
            json.dump(dice, file)
        return " ".join(map(str, dice))
    with open(ROLL) as file:
        return str(sum(json.load(file)))


try:
    reply = {"result": answer(json.loads(sys.stdin.readline())["op"])}
except FileNotFoundError:
    reply = {"error": "roll first"}
with open(int(os.environ["AGENTRT_REPLY_FD"]), "w") as output:
    output.write(json.dumps(reply) + "\n")

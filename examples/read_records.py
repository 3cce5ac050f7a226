"""What a run left, read without agentrt's engine: each row's tokens, and what the rewards say of its group.

python examples/read_records.py outputs/demo
"""

import sys
from pathlib import Path

from agentrt.core.records import EpisodeRecord, GroupRecord, good_records, joined, read


def main(folder: Path) -> None:
    groups = {group.task_id: group for group in read(folder / "groups.jsonl", GroupRecord)}
    good = good_records(read(folder / "trajectories.jsonl", EpisodeRecord))  # the highest attempt that went well
    for (task_id, member), record in sorted(good.items()):
        advantage = groups[task_id].advantages[member] if task_id in groups else None
        shown = "none" if advantage is None else f"{advantage:+.2f}"
        print(f"{task_id} member {member}: reward {record.reward}, advantage {shown}, {record.stop_reason}")
        for branch in record.branches:
            tokens = joined(record, branch)  # of a fork: with the ids it shares
            versions = {version for version in tokens.versions if version >= 0}
            print(
                f"    {branch.name}: {len(tokens)} ids, {tokens.num_sampled} sampled by policy versions {versions or '–'}"
            )
        for call in record.calls:
            where = f"{call.branch}, turn {call.turn}"
            print(f"    {where}: {call.name} {call.arguments} gave {call.outcome} in {call.seconds:.3f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

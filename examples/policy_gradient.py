"""One step of policy gradient with the records of a run: what a trainer does with them.

python examples/policy_gradient.py outputs/demo NEW_MODEL_FOLDER
"""

import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from agentrt.core.models import find_model
from agentrt.core.records import EpisodeRecord, GroupRecord, good_records, joined, read
from agentrt.rollout.sink import stored_run

RATE, CLIP = 1e-4, 0.2


def main(folder: Path, target: Path) -> None:
    source = find_model(stored_run(folder).spec.model)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    advantages = {group.task_id: group.advantages for group in read(folder / "groups.jsonl", GroupRecord)}
    good = good_records(read(folder / "trajectories.jsonl", EpisodeRecord))
    rows, total, distance = 0, sum(branch.mask.count(1) for one in good.values() for branch in one.branches), 0.0
    for (task_id, member), record in good.items():
        advantage = advantages[task_id][member]
        if advantage is None or not total:
            continue  # not scored: no evidence for or against what was said
        for branch in record.branches:
            tokens, shared = joined(record, branch), branch.fork.at if branch.fork else 0
            ids_1T = torch.tensor([tokens.token_ids.tolist()])
            mask_T = torch.tensor(tokens.mask.tolist()[1:], dtype=torch.float32)
            mask_T[: max(shared - 1, 0)] = 0.0  # sampled once, in the branch it was forked from
            sampled_with_T = torch.tensor(tokens.logprobs.tolist()[1:])
            logprobs_TV = model(ids_1T).logits[0, :-1].log_softmax(-1)
            logprobs_T = logprobs_TV.gather(1, ids_1T[0, 1:, None])[:, 0]
            ratio_T = (logprobs_T - sampled_with_T).exp()
            clipped_T = ratio_T.clamp(1 - CLIP, 1 + CLIP)
            gain_T = torch.minimum(ratio_T * advantage, clipped_T * advantage)
            torch.autograd.backward(-(gain_T * mask_T).sum() / total)
            distance = max(distance, ((logprobs_T - sampled_with_T) * mask_T).abs().max().item())
            rows += 1
    optimizer.step()
    model.save_pretrained(target)
    for extra in source.glob("tokenizer*"):
        shutil.copy(extra, target)
    print(f"{rows} rows, {total} sampled tokens; logprobs differ from the recorded ones by at most {distance:.1e}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

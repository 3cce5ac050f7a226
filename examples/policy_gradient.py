"""One step of policy gradient with the records of a run: what a trainer does with them.

python examples/policy_gradient.py outputs/demo NEW_MODEL_FOLDER
"""

import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from agentrt.core.models import find_model
from agentrt.rollout.export import rows
from agentrt.rollout.sink import RunFolder, stored_run

RATE, CLIP = 1e-4, 0.2


def main(folder: Path, target: Path) -> None:
    source = find_model(stored_run(folder).spec.model)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    # A row without an advantage was not scored: no evidence for or against what was said.
    table = [row for row in rows(RunFolder.resume(folder)) if row["advantage"] is not None]
    total, distance = sum(row["mask"].count(1) for row in table), 0.0
    for row in table:
        ids_1T = torch.tensor([row["token_ids"].tolist()])
        mask_T = torch.tensor(row["mask"].tolist()[1:], dtype=torch.float32)
        sampled_with_T = torch.tensor(row["logprobs"].tolist()[1:])
        logprobs_TV = model(ids_1T).logits[0, :-1].log_softmax(-1)
        logprobs_T = logprobs_TV.gather(1, ids_1T[0, 1:, None])[:, 0]
        ratio_T = (logprobs_T - sampled_with_T).exp()
        clipped_T = ratio_T.clamp(1 - CLIP, 1 + CLIP)
        gain_T = torch.minimum(ratio_T * row["advantage"], clipped_T * row["advantage"])
        torch.autograd.backward(-(gain_T * mask_T).sum() / max(total, 1))
        distance = max(distance, ((logprobs_T - sampled_with_T) * mask_T).abs().max().item())
    optimizer.step()
    model.save_pretrained(target)
    for extra in source.glob("tokenizer*"):
        shutil.copy(extra, target)
    print(
        f"{len(table)} rows, {total} sampled tokens; logprobs differ from the recorded ones by at most {distance:.1e}"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

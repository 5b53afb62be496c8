# ruff: noqa: T201
"""Replace softmax, fine-tune, watch attention meanwhile, save, load, generate, and see what has changed.

python docs/examples/finetune.py                                       the bundled model on Python's own help
python docs/examples/finetune.py --model smollm2/ --text book.txt      your own
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch
from transformers import PreTrainedModel, Trainer, TrainingArguments

import attnorm
from attnorm.models.load import load


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled", help="a hub name, a folder, or 'bundled'")
    parser.add_argument("--text", type=Path, help="what to train on; by default Python's own help")
    parser.add_argument("--normalizer", default="ssmax")
    parser.add_argument("--length", type=int, default=128, help="tokens of a training example")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("finetuned"))
    return parser.parse_args()


def main() -> None:
    chosen = arguments()
    torch.manual_seed(0)
    loaded = load(chosen.model, dtype=torch.float32)  # half precision, as checkpoints have it, loses small updates
    model, tokenizer = loaded.model, loaded.tokenizer
    text = chosen.text.read_text(encoding="utf-8") if chosen.text else " ".join(topics.values())

    needed = chosen.steps * chosen.batch
    ids = tokenizer(text[: 16 * chosen.length * (needed + 1)], return_tensors="pt").input_ids[0]
    examples = ids[: len(ids) // chosen.length * chosen.length].reshape(-1, chosen.length)[: needed + 1]
    if len(examples) < 2:
        raise SystemExit(
            f"the text has {len(ids)} tokens; give one of at least {2 * chosen.length}, or a lower --length"
        )
    train, held_out = examples[:-1], examples[-1]  # the last is never trained on
    print(f"{len(train)} examples of {chosen.length} tokens")
    before = attnorm.analyze(model, held_out, tokenizer, metrics="core")
    print(f"loss with softmax:                  {loss(model, held_out):.3f}")

    # train_length: the scale s log n starts at 1 on average over texts of this length, not of the model's longest.
    handle = attnorm.patch(model, chosen.normalizer, train_length=chosen.length)
    patched = attnorm.analyze(model, held_out, tokenizer, metrics="core")
    print(f"loss with {chosen.normalizer}, not trained yet:   {loss(model, held_out):.3f}")

    own = {id(parameter) for parameter in handle.parameters()}
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if id(p) not in own], "lr": 1e-5},
            {"params": [*handle.parameters()], "lr": 1e-3, "weight_decay": 0.0},  # few numbers, with a way to go
        ]
    )
    trainer = Trainer(
        model,
        TrainingArguments(
            str(chosen.out / "run"),
            max_steps=chosen.steps,
            per_device_train_batch_size=chosen.batch,
            logging_steps=max(1, chosen.steps // 4),
            lr_scheduler_type="constant",
            save_strategy="no",
            report_to="none",  # "tensorboard", "wandb", "mlflow", "trackio": they all get the monitor's numbers
            dataloader_pin_memory=torch.cuda.is_available(),
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": example, "labels": example} for example in train],
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
    )
    monitor = attnorm.AttentionMonitor().attach(trainer)
    trainer.train()
    for entry in trainer.state.log_history:
        values = [value for key, value in entry.items() if key.endswith("/entropy_ratio_mean")]
        if values:
            print(f"step {entry['step']:3}: loss {entry['loss']:.3f}, entropy / log n {sum(values) / len(values):.3f}")
    for alert in monitor.alerts:
        print(f"alert at step {alert.step}: {alert}")

    model.eval()
    print(f"loss with {chosen.normalizer}, fine-tuned:        {loss(model, held_out):.3f}")
    attnorm.save_pretrained(model, chosen.out / "model")
    tokenizer.save_pretrained(chosen.out / "model")

    again = attnorm.from_pretrained(chosen.out / "model")  # transformers' own would bring softmax back
    print(f"loss after save and load:           {loss(again, held_out):.3f}")
    prompt = held_out[None, : chosen.length // 4].to(again.device)
    answer = again.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False)
    print(f"... {tokenizer.decode(answer[0, prompt.shape[1] - 12 :])!r}")

    after = attnorm.analyze(again, held_out, tokenizer, metrics="core")
    print(f"\nmean over heads   softmax   {chosen.normalizer}   fine-tuned")
    for name in ("entropy_ratio", "effective_keys", "sink_mass", "jacobian_norm"):
        means = [sum(run.heads.column(name).to_pylist()) / run.heads.num_rows for run in (before, patched, after)]
        print(f"{name:16}" + "".join(f"{mean:9.3f}" for mean in means))


@torch.no_grad()
def loss(model: PreTrainedModel, ids: torch.Tensor) -> float:
    ids = ids[None].to(model.device)
    return float(model(input_ids=ids, labels=ids).loss)


if __name__ == "__main__":
    main()

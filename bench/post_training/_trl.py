"""TRL's DPOTrainer, whose training is taken one step at a time: it runs in a thread of its own that waits between steps."""

import threading
from collections.abc import Callable
from pathlib import Path

import datasets
import peft
import tokenizers
import torch
import transformers
import trl
from torch.utils.data import SequentialSampler

from bench._turns import Rank
from bench.post_training._subject import BETA, CLIP_NORM, SETTINGS

__all__ = ["trl_step"]


class _Trainer(trl.DPOTrainer):
    """Reads rows that are tokens already, in their order, and remembers the loss of the last step."""

    seen: torch.Tensor

    def _prepare_dataset(self, dataset, *args, **kwargs):  # type: ignore[no-untyped-def]
        return dataset

    def _get_train_sampler(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        return SequentialSampler(self.train_dataset)

    def training_step(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        self.seen = super().training_step(*args, **kwargs)
        return self.seen


class _Turns(transformers.TrainerCallback):
    """Holds the trainer before each step until `go` is set, and says when it has taken it."""

    def __init__(self) -> None:
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.failed: BaseException | None = None

    def on_train_begin(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        self.done.release()
        self.go.acquire()

    def on_step_end(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        self.done.release()
        self.go.acquire()


def _tokenizer() -> transformers.PreTrainedTokenizerFast:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<end>": 0}, unk_token="<end>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>")


def trl_step(rank: Rank, rows: list, per_rank: int, adapted: bool, out: Path) -> Callable[[], torch.Tensor]:
    """The step of a trainer over `rows` (dicts of tokens), `per_rank` of them a step and rank."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(rank.work / "hf", dtype=torch.float32)
    if adapted:
        model = peft.PeftModel.from_pretrained(model, rank.work / "adapter", is_trainable=True)
    args = trl.DPOConfig(
        output_dir=str(out),
        per_device_train_batch_size=per_rank,
        beta=BETA,
        learning_rate=SETTINGS["lr"],
        adam_beta2=SETTINGS["betas"][1],
        weight_decay=SETTINGS["weight_decay"],
        max_grad_norm=CLIP_NORM,
        lr_scheduler_type="constant",
        warmup_steps=0,
        optim="adamw_torch_fused",
        bf16=False,
        gradient_checkpointing=False,
        max_length=None,
        use_cpu=True,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        num_train_epochs=1,
        disable_tqdm=True,
    )
    turns = _Turns()
    reference = None if adapted else load(rank.work / "hf", dtype=torch.float32)
    trainer = _Trainer(
        model=model,
        ref_model=reference,
        args=args,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=_tokenizer(),
        callbacks=[turns],
    )
    if adapted and "ref" in trainer.model.peft_config:  # it would compare with a copy of the adapter, not with the base
        trainer.model.delete_adapter("ref")

    def train() -> None:
        try:
            trainer.train()
        except BaseException as error:
            turns.failed = error
            turns.done.release()

    threading.Thread(target=train, daemon=True).start()
    turns.done.acquire()  # until here it exchanges messages, in the same group as everybody

    def step() -> torch.Tensor:
        turns.go.release()
        turns.done.acquire()
        if turns.failed is not None:
            raise turns.failed
        mean = trainer.seen.detach() / rank.num_ranks
        if rank.num_ranks > 1:
            torch.distributed.all_reduce(mean)
        return mean

    return step

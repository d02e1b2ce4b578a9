"""Names of settings: which one was meant by a name that does not exist. No misspelt or misplaced setting is ever ignored."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import SequenceMatcher

from tether.errors import UserError

# What other libraries call our settings: theirs -> (ours, what differs). An empty name: we have no such setting, for the stated reason.
FOREIGN: dict[str, tuple[str, str]] = {
    "per_device_train_batch_size": ("batch_size", "it counts the rows of a whole optimiser step, accumulation included"),
    "train_batch_size": ("batch_size", "it counts the rows of a whole optimiser step"),
    "micro_batch_size": ("tokens_per_micro_batch", "micro-batches are cut by tokens, not by rows"),
    "gradient_accumulation_steps": (
        "batch_size",
        "set the rows of a whole step; tokens_per_micro_batch decides into how many parts it is cut",
    ),
    "num_train_epochs": ("epochs", ""),
    "num_epochs": ("epochs", ""),
    "n_epochs": ("epochs", ""),
    "max_epochs": ("epochs", ""),
    "steps": ("max_steps", ""),
    "num_steps": ("max_steps", ""),
    "max_train_steps": ("max_steps", ""),
    "total_steps": ("max_steps", ""),
    "output_dir": ("run", ""),
    "out_dir": ("run", ""),
    "run_name": ("run", ""),
    "save_path": ("run", ""),
    "model_name": ("model", ""),
    "model_name_or_path": ("model", ""),
    "base_model": ("model", ""),
    "pretrain": ("model", ""),
    "dataset": ("data", ""),
    "datasets": ("data", ""),
    "dataset_name": ("data", ""),
    "train_dataset": ("data", ""),
    "train_file": ("data", ""),
    "data_path": ("data", ""),
    "eval_dataset": ("eval_data", ""),
    "val_size": ("eval_fraction", ""),
    "lr": ("learning_rate", ""),
    "lr_scheduler_type": ("lr_scheduler", ""),
    "scheduler": ("lr_scheduler", ""),
    "warmup": ("warmup_steps", "in optimiser steps"),
    "warmup_ratio": ("warmup_steps", "in optimiser steps, not as a share"),
    "max_seq_length": ("max_length", ""),
    "max_seq_len": ("max_length", ""),
    "max_len": ("max_length", ""),
    "cutoff_len": ("max_length", ""),
    "sequence_len": ("max_length", ""),
    "max_prompt_length": ("max_length", "one limit holds for prompt and answer together"),
    "bf16": ("precision", "bf16, fp32 or auto"),
    "fp16": ("precision", "bf16, fp32 or auto"),
    "dtype": ("precision", "bf16, fp32 or auto"),
    "torch_dtype": ("precision", "bf16, fp32 or auto"),
    "logging_steps": ("log_every", ""),
    "report_to": ("trackers", "a list"),
    "save_total_limit": ("keep_checkpoints", ""),
    "evaluation_steps": ("eval_steps", ""),
    "grad_clip": ("max_grad_norm", ""),
    "clip_grad_norm": ("max_grad_norm", ""),
    "adam_eps": ("adam_epsilon", ""),
    "betas": ("adam_beta1", "and adam_beta2"),
    "num_threads": ("threads", ""),
    "use_peft": ("lora", "a block: lora.rank, lora.alpha, ..."),
    "peft": ("lora", "a block: lora.rank, lora.alpha, ..."),
    "lora_r": ("lora.rank", ""),
    "lora_rank": ("lora.rank", ""),
    "r": ("lora.rank", ""),
    "lora_alpha": ("lora.alpha", ""),
    "lora_dropout": ("lora.dropout", ""),
    "lora_target": ("lora.target_modules", ""),
    "lora_target_modules": ("lora.target_modules", ""),
    "lora_modules_to_save": ("lora.modules_to_save", ""),
    "completion_only_loss": ("train_on", "assistant, last or all"),
    "assistant_only_loss": ("train_on", "assistant, last or all"),
    "train_on_inputs": ("train_on", "assistant, last or all"),
    "train_on_prompt": ("train_on", "assistant, last or all"),
    "center_rewards_coefficient": ("center_coef", ""),
    "ref_model": ("reference", ""),
    "ref_model_name_or_path": ("reference", ""),
    "precompute_ref_log_probs": ("cache_reference", ""),
    "pref_beta": ("beta", ""),
    "pref_loss": ("loss_type", ""),
    "dpo_beta": ("beta", ""),
    "tau": ("beta", "IPO's tau is beta here"),
    "dpo_label_smoothing": ("label_smoothing", ""),
    "simpo_gamma": ("gamma", "it is not multiplied by beta"),
    "gamma_beta_ratio": ("gamma", "gamma is not multiplied by beta: write ratio x beta"),
    "cpo_alpha": ("nll_coef", ""),
    "rpo_alpha": ("nll_coef", "with loss_type dpo_nll_seq"),
    "pref_ftx": ("nll_coef", "with loss_type dpo_nll_seq"),
    "orpo_alpha": ("lambda_or", ""),
    "dpop_lambda": ("lambda_dpop", ""),
    "group_size": ("num_generations", ""),
    "n_samples_per_prompt": ("num_generations", ""),
    "epsilon": ("eps_low", "and eps_high"),
    "epsilon_high": ("eps_high", ""),
    "cliprange": ("eps_low", "and eps_high"),
    "clip_eps": ("eps_low", "and eps_high"),
    "max_new_tokens": ("max_completion_length", ""),
    "kl_coef": ("beta", ""),
    "init_kl_coef": ("beta", ""),
    "epsilon_low": ("eps_low", ""),
    "cliprange_value": ("value_clip", ""),
    "num_iterations": ("updates_per_batch", ""),
    "num_ppo_epochs": ("updates_per_batch", ""),
    "ppo_epochs": ("updates_per_batch", ""),
    "num_mini_batches": ("mini_batches", ""),
    "reward_funcs": ("rewards", "a list of names, or of blocks {reward: ..., weight: ...}"),
    "reward_functions": ("rewards", "a list of names, or of blocks {reward: ..., weight: ...}"),
    "reward_weights": ("rewards", "the weight stands in a reward's own block: {reward: ..., weight: ...}"),
    "reward_model_path": ("rewards", "such as [{reward: model, model: FOLDER}]"),
    "scale_rewards": ("advantage", "group_norm, batch_std or group_mean"),
    "advantage_estimator": ("advantage", ""),
    "kl_estimator": ("kl_kind", ""),
    "target_kl": ("kl_target", "nats per answer"),
    "ref_model_sync_steps": ("reference_refresh_steps", ""),
    "sync_ref_model": ("reference_refresh_steps", "a number of steps"),
    "mask_truncated_completions": ("mask_truncated", ""),
    "missing_eos_penalty": ("missing_end_penalty", ""),
    "gae_lambda": ("lam", ""),
    "value_model": ("critic_model", ""),
    "top_p": ("", "attempts are drawn from the policy as it is, or their log-probs would not be those that are trained; set temperature"),
    "top_k": ("", "attempts are drawn from the policy as it is, or their log-probs would not be those that are trained; set temperature"),
    "min_p": ("", "attempts are drawn from the policy as it is, or their log-probs would not be those that are trained; set temperature"),
    "repetition_penalty": ("", "attempts are drawn from the policy as it is; a reward can make repetition costly (repetition)"),
    "min_new_tokens": (
        "",
        "an end that is suppressed is not the policy's own, and makes the KL negative; a reward can make short answers costly",
    ),
    "packing": ("", "rows are always packed without padding and never see each other"),
    "padding_free": ("", "rows are always packed without padding and never see each other"),
    "group_by_length": ("", "micro-batches are always filled by length, and the update does not depend on it"),
    "optim": ("", "the optimiser is AdamW"),
    "optimizer": ("", "the optimiser is AdamW"),
    "use_cpu": ("", "the device is chosen from what the machine has"),
    "per_device_eval_batch_size": ("", "evaluation is cut by tokens_per_micro_batch"),
}


class SettingError(UserError):
    """A setting that cannot be used. `key` is its full dotted path, so that the caller can add file and line."""

    def __init__(self, what: str, *, key: str, remedy: str | None = None, place: str | None = None) -> None:
        self.key = key
        super().__init__(what, where=f"{place}: {key}" if place else key, remedy=remedy)


def plain(key: str) -> str:
    """The key as we spell keys: lower case, underscores."""
    return key.strip().lower().replace("-", "_")


def meant(key: str, own: Collection[str], others: Mapping[str, Collection[str]]) -> str:
    """One sentence on what an unknown key was probably meant to be.

    `key` and the keys in `own` are full dotted paths; `others` holds the keys of the other commands by command name.

    >>> meant("learning_rte", ["learning_rate", "lora.rank"], {})
    'Did you mean learning_rate?'
    >>> meant("lora_r", ["learning_rate", "lora.rank"], {})
    'It is called lora.rank here.'
    >>> meant("heads", ["learning_rate"], {"reward": ["heads"]})
    'It belongs to `tether reward`.'
    """
    spelt, leaf = plain(key), plain(key).rsplit(".", 1)[-1]
    if spelt in own and spelt == key:
        block, _, name = key.rpartition(".")
        return f"Write it as a block, {block}: {{{name}: ...}}."
    if spelt in own:
        return f"Write {spelt}: keys are lower case with underscores."
    by_leaf = {path.rsplit(".", 1)[-1]: path for path in sorted(own, reverse=True)}
    if leaf in by_leaf:
        return f"Its place is {by_leaf[leaf]}."
    for name in (spelt, leaf):
        if name in FOREIGN:
            ours, differs = FOREIGN[name]
            if not ours:
                return f"There is no such setting: {differs}."
            if ours in own or not _owners(ours, others):
                return f"It is called {ours} here" + (f": {differs}." if differs else ".")
            return f"It is called {ours} here and belongs to {_owners(ours, others)}" + (f": {differs}." if differs else ".")
    if owners := _owners(spelt, others) or _owners(leaf, others):
        return f"It belongs to {owners}."
    mine, my_score = _nearest(spelt, leaf, own)
    theirs, their_score = _nearest(spelt, leaf, {path for paths in others.values() for path in paths})
    if max(my_score, their_score) < 0.6:
        return ""
    if their_score > my_score + 0.05:
        return f"Did you mean {theirs}, which belongs to {_owners(theirs, others)}?"
    return f"Did you mean {mine}?"


def nearest(value: str, names: Collection[str]) -> str | None:
    """The name most like `value`, if one is like it at all.

    >>> nearest("simgoid", ["hinge", "sigmoid"])
    'sigmoid'
    """
    name, score = _nearest(plain(value), plain(value), names)
    return name if score >= 0.6 else None


def _owners(key: str, others: Mapping[str, Collection[str]]) -> str:
    return " and ".join(f"`tether {command}`" for command, paths in others.items() if key in paths)


def _nearest(spelt: str, leaf: str, paths: Collection[str]) -> tuple[str, float]:
    def score(path: str) -> float:
        last = path.rsplit(".", 1)[-1]
        return max(SequenceMatcher(None, spelt, path).ratio(), SequenceMatcher(None, leaf, last).ratio())

    best = max(sorted(paths), key=score, default="")
    return best, score(best) if best else 0.0

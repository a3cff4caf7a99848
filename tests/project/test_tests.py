"""Each module of the source has a test file of its name, in the same folder; or it is said where it is tested."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import ROOT

TESTS = ROOT / "tests"

THROUGH_A_PUBLIC_CALL = {
    "training/step_facts": "cards/test_steps_on_cards",
    "training/pipeline/microbatch_graphs": "training/test_trainer",
    "training/pipeline/microbatch_run": "training/test_trainer",
    "training/pipeline/rank_parameters": "training/test_trainer",
    "training/pipeline/replica_gradients": "training/test_trainer",
    "training/low_memory/blocks": "training/low_memory/test_packing",
    "training/low_memory/optimizer": "training/low_memory/test_low_memory",
    "runtime/calls/structure": "runtime/calls/test_executable",
    "training/low_memory/parts": "training/low_memory/test_low_memory",
    "integrations/transformers/pages/attention_to_pages": "integrations/attention_kernels/test_continuous_batching",
    "passes/check/gathers": "passes/emit/zero/test_gathers",
    "training/low_memory/stored_state": "training/low_memory/test_offloaded",
    "ops/losses/argmax": "ops/losses/test_linear_mixed_terms",
    "ops/losses/chunks": "ops/losses/test_losses_linear_cross_entropy",
    "passes/lower/losses/logit_rules": "passes/lower/losses/test_logit_values",
    "passes/lower/losses/row_terms": "passes/lower/losses/test_logit_values",
    "passes/lower/losses/term_requests": "passes/lower/losses/test_logit_values",
    "api": "system/test_refusals",
    "tools/conversion/content": "tools/cli/test_convert",
    "tools/conversion/formats": "tools/cli/test_convert",
    "checkpoint/optimizers": "checkpoint/test_whole_optimizer",
    "checkpoint/write": "checkpoint/test_saving_ends",
    "tools/cli/app": "tools/cli/test_main",
    "tools/cli/flags": "tools/cli/test_cli_plan",
    "tools/cli/output": "tools/cli/test_main",
    "diagnostics/report": "diagnostics/test_plan",
    "distributed/background_exchange": "distributed/peers/test_heartbeat",
    "tools/estimation/layout": "tools/estimation/test_estimate",
    "tools/estimation/price": "tools/estimation/test_estimate",
    "tools/estimation/result": "tools/estimation/test_estimate",
    "costs/operators": "tools/estimation/counts/test_record",
    "tools/estimation/counts/pieces": "tools/estimation/counts/test_activations",
    "integrations/attention_kernels/kernel_operator": "integrations/attention_kernels/test_flash_functions",
    "integrations/attention_kernels/kernel_rule": "integrations/attention_kernels/test_flash_functions",
    "integrations/attention_kernels/padded_rows": "integrations/attention_kernels/test_attention_implementations",
    "integrations/attention_kernels/reference": "integrations/attention_kernels/test_flash_functions",
    "integrations/attention_kernels/flex/mask_arguments": "integrations/attention_kernels/flex/test_flex_attention",
    "passes/pipeline/documents": "training/pipeline/test_pipeline_documents",
    "integrations/attention_kernels/packed_rows": "integrations/attention_kernels/test_varlen_attn",
    "integrations/attention_kernels/kernel_table": "integrations/attention_kernels/test_varlen_attn",
    "integrations/loops/accelerate_state": "integrations/loops/test_replicas",
    "integrations/loops/neftune": "integrations/loops/test_trainer_calls",
    "integrations/loops/replica_collectives": "integrations/loops/test_replicas",
    "integrations/loops/torchmetrics_calls": "integrations/test_lightning",
    "integrations/transformers/caches": "integrations/transformers/test_generation",
    "integrations/transformers/files/configuration": "integrations/transformers/test_pretrained_alone",
    "integrations/transformers/files/conversion": "tools/cli/test_convert",
    "integrations/transformers/generation_settings": "distributed/test_ranks_differ",
    "integrations/transformers/library": "integrations/transformers/test_hf_calls",
    "integrations/transformers/overrides": "integrations/transformers/test_generation",
    "model_library": "integrations/transformers/test_hf_calls",
    "tools/new_training/ray_train": "tools/new_training/test_init",
    "tools/new_training/train": "tools/new_training/test_init",
    "tools/page/subject": "tools/page/test_page_data",
    "runtime/func_gradients": "system/test_transforms",
    "runtime/grad_norm": "runtime/torch_hooks/test_clip_and_scale",
    "runtime/torch_hooks/install": "runtime/torch_hooks/test_clip_and_scale",
}
"""What is a step of a public call, and needs ranks, files or transformers: tested through the call."""

BY_ITS_TABLE = {
    "rules/common": "rules/test_table",
    "rules/indexing": "rules/test_table",
    "rules/products": "rules/test_table",
    "rules/views": "rules/test_table",
    "rules/registry": "rules/test_table",
    "rules/row": "rules/test_traits",
}
"""Rules and traits: every row of the table is tried on slices."""

BY_WHAT_IS_CAPTURED = {
    "passes/canonicalize/custom_vjp": "passes/capture/test_autograd_functions",
    "passes/capture/capture": "passes/capture/test_inline",
    "passes/capture/captured": "passes/capture/python_state/test_attribute_writes",
    "passes/capture/exported_program": "passes/capture/test_inline",
    "passes/capture/patches": "passes/capture/python_state/test_guard",
    "passes/capture/replacements/opaque_call": "passes/capture/replacements/test_opaque",
    "passes/capture/repeats/record": "passes/capture/repeats/test_repeats",
    "passes/capture/repeats/unfold": "passes/capture/repeats/test_repeats",
    "passes/capture/unsupported/explain_failure": "system/test_refusals",
    "ops/experts/load": "passes/emit/test_count_load",
    "training/pipeline/expert_load": "passes/emit/test_count_load",
    "passes/emit/kept_values/checkpointed": "passes/emit/test_compiled",
    "passes/emit/kept_values/exact_bits": "passes/emit/kept_values/test_split",
    "passes/emit/kept_values/fates": "passes/emit/kept_values/test_split",
    "passes/emit/kept_values/recomputed": "passes/emit/kept_values/test_recompute",
    "passes/lower/localize": "passes/lower/test_lower",
    "tools/estimation/counts/kept": "tools/estimation/counts/test_counts_budget",
    "passes/program/canonicalized": "test_compiler",
    "passes/program/emitted": "test_compiler",
    "passes/program/loss_only": "passes/pipeline/test_loss_totals",
    "passes/program/planned": "test_compiler",
    "passes/program/program": "test_compiler",
    "passes/program/sequences": "passes/plan/sequence/test_context_parallel",
}
"""Parts of a stage that have no input of their own: tested on models, by the graph that the stage makes."""

ELSEWHERE = THROUGH_A_PUBLIC_CALL | BY_ITS_TABLE | BY_WHAT_IS_CAPTURED


def modules() -> list[str]:
    """The modules of `autotp/` and `passes/`, as their tests are named: `runtime/tree`, `passes/lower/dce`."""
    found = [path.relative_to(ROOT / "autotp") for path in (ROOT / "autotp").rglob("*.py")]
    found += [path.relative_to(ROOT) for path in (ROOT / "passes").rglob("*.py")]
    return sorted({str(path.with_suffix("")) for path in found if not path.name.startswith("_")})


def own_test(module: str) -> Path | None:
    """The test of a module's name. pytest wants names that differ: of two that are alike one has its folder in it."""
    path = Path(module)
    names = f"test_{path.name}.py", f"test_{path.parent.name}_{path.name}.py"
    return next((TESTS / path.parent / name for name in names if (TESTS / path.parent / name).exists()), None)


def test_each_module_has_a_test_of_its_name() -> None:
    assert [module for module in modules() if own_test(module) is None and module not in ELSEWHERE] == []


@pytest.mark.parametrize("module", ELSEWHERE)
def test_a_module_that_is_tested_elsewhere_has_no_test_of_its_own(module: str) -> None:
    """The module is there, and so is the other test; once it has a test of its own, it needs no line here."""
    assert module in modules() and own_test(module) is None
    assert (TESTS / f"{ELSEWHERE[module]}.py").exists()

"""A plan as tables and sentences, for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.table import Table

from swiftkv.cache.division import SharedExtents
from swiftkv.config import Config
from swiftkv.planning.lending import BorrowerRoom, LendingPair
from swiftkv.planning.models import ModelPlan, SizedPlan
from swiftkv.planning.transports import describe_transports
from swiftkv.tables import console_for, plain_table
from swiftkv.units import DeviceShare, format_size


def print_plan(config: Config, plans: Sequence[ModelPlan], rooms: Sequence[BorrowerRoom]) -> None:
    """Print all that is known before a node starts: sizes, lending, transports."""
    _print_models(plans)
    _print_rooms(rooms)
    for memory, choice in describe_transports(config, plans):
        print(f"\nLending in the memory of {memory} uses {choice}.")
    if not config.node.lending.enabled:
        print("\nNothing is lent: node.lending is off.")
        return
    for line in _unreached(plans):
        print(f"\n{line}")


def _unreached(plans: Sequence[ModelPlan]) -> Iterator[str]:
    """Yield a sentence for each pair of models that cannot lend because only one of them is on a GPU."""
    for master in (plan for plan in plans if plan.role == "master"):
        for worker in (plan for plan in plans if plan.budget_bytes is not None):
            if worker.on_gpu != master.on_gpu:
                yield (
                    f"{worker.name} ({worker.device}) does not lend to {master.name} ({master.device}): KV that "
                    "passes between the host and a GPU is not streamed in this version."
                )


def _weights(plan: ModelPlan) -> str:
    if plan.weight_bytes == plan.unpacked_bytes:
        return f"{format_size(plan.weight_bytes)} {plan.dtype}"
    return f"{format_size(plan.weight_bytes)} quantized ({format_size(plan.unpacked_bytes)} in {plan.dtype})"


def _print_models(plans: Sequence[ModelPlan]) -> None:
    table = plain_table(("",), (plan.name for plan in plans))
    divided = any(p.tensor_parallel_size > 1 for p in plans)
    sequences = {
        "sequence at rest": [_of_groups(p.bytes_at_rest) for p in plans],
        "sequence in prefill": [_of_groups(p.bytes_in_prefill) for p in plans],
    }
    rows = {
        "architecture": [p.architecture for p in plans],
        "role": [p.role for p in plans],
        **({"ranks, each with": [str(p.tensor_parallel_size) for p in plans]} if divided else {}),
        "weights": [_weights(p) for p in plans],
        **({"device": [p.device for p in plans]} if any(p.on_gpu for p in plans) else {}),
        "KV cache": [_pool_size(p) for p in plans],
        "blocks": [_once_known(p, _blocks) for p in plans],
        "block": [format_size(p.block_bytes) for p in plans],
        "layer block": [_of_groups([group.layer_block_bytes for group in p.groups]) for p in plans],
        **({"extent": [_extent(p) for p in plans]} if any(_extent(p) != "-" for p in plans) else {}),
        "layers": [" + ".join(str(group.num_layers) for group in p.groups) for p in plans],
        "KV per token": [format_size(p.bytes_per_token) for p in plans],
        "tokens cached": [_once_known(p, lambda p: f"{p.pool_tokens:,}") for p in plans],
        "longest context": [_once_known(p, lambda p: f"{p.longest_context:,}") for p in plans],
        "max_model_len": [f"{p.max_model_len:,}" for p in plans],
        **(sequences if any(p.has_windows for p in plans) else {}),
        **({"host memory": [_host(p) for p in plans]} if any(p.host for p in plans) else {}),
        **({"storage": [_storage(p) for p in plans]} if any(p.storage for p in plans) else {}),
        **({"page-locked": [_page_locked(p) for p in plans]} if any(p.page_locked_bytes for p in plans) else {}),
    }
    for label, cells in rows.items():
        table.add_row(label, *cells)
    console = console_for(table)
    console.print(table)
    pool_bytes = sum(p.tensor_parallel_size * p.pool_bytes for p in plans if isinstance(p, SizedPlan))
    total_bytes = pool_bytes + sum(p.tensor_parallel_size * p.weight_bytes for p in plans)
    counted = "1 model" if len(plans) == 1 else f"{len(plans)} models"
    console.print(f"\n{counted}, {format_size(total_bytes)} of weights and KV cache together.")


def _of_groups(group_bytes: Sequence[int]) -> str:
    return " + ".join(format_size(num_bytes) for num_bytes in group_bytes)


def _blocks(plan: SizedPlan) -> str:
    shares = isinstance(plan.division, SharedExtents)
    return (" or " if shares else " + ").join(f"{n:,}" for n in plan.group_blocks) + f" of {plan.block_size} tokens"


def _extent(plan: ModelPlan) -> str:
    """Return the size of the extents that a model's KV groups hand to each other."""
    return format_size(plan.division.extent_bytes) if isinstance(plan.division, SharedExtents) else "-"


def _host(plan: ModelPlan) -> str:
    """Return the size of the host memory that a model brings, in bytes and in tokens of this model alone."""
    if plan.host_bytes is None:
        return "-"
    return f"{format_size(plan.host_bytes)}: {_at_least(plan)}{plan.host_tokens:,} tokens"


def _storage(plan: ModelPlan) -> str:
    """Return the size of a storage tier, in bytes and in tokens of this model alone."""
    if plan.storage is None:
        return "-"
    if plan.storage_bytes is None:
        return plan.storage.backend
    return f"{plan.storage.backend}, {format_size(plan.storage_bytes)}: {_at_least(plan)}{plan.storage_tokens:,} tokens"


def _page_locked(plan: ModelPlan) -> str:
    """Return the size of the host memory between a pool on a GPU and the tiers below it."""
    return format_size(plan.page_locked_bytes) if plan.page_locked_bytes else "-"


def _at_least(plan: ModelPlan) -> str:
    """Return the words before a tier's number of tokens. That counts window groups in full, although they keep less."""
    return "at least " if plan.has_windows else ""


def _once_known(plan: ModelPlan, cell: Callable[[SizedPlan], str]) -> str:
    return cell(plan) if isinstance(plan, SizedPlan) else "known at start"


def _pool_size(plan: ModelPlan) -> str:
    """Return the size of a pool as text. For a part of a GPU, weights and activations are still to be subtracted."""
    if isinstance(plan.memory, DeviceShare):
        return f"rest of {float(plan.memory.part):.0%} of {plan.device}"
    return str(plan.memory)


def _print_rooms(rooms: Sequence[BorrowerRoom]) -> None:
    for room in rooms:
        others = f" (every budget is divided among {len(rooms)} masters)" if len(rooms) > 1 else ""
        table = _lending_table(room)
        console = console_for(table)
        console.print(f"\n{room.borrower.name} borrows{others}:")
        console.print(table)
        for note in _lending_notes(room):
            console.print(f"- {note}")


def _lending_table(room: BorrowerRoom) -> Table:
    """Return a table: the master without lending, a column for each pair, and all of them if there are several."""
    pairs = room.pairs
    shared = any(pair.share < 1 for pair in pairs)
    together = [room] if len(pairs) > 1 else []
    figures = ("no lending", *(_pair_name(pair) for pair in pairs), *("together" for _ in together))
    table = plain_table(("",), figures)
    for label, cells in {
        "block of the worker": [format_size(p.lender.groups[p.lender_group].block_bytes) for p in pairs],
        "block of the master": [format_size(p.extent.borrower_block_bytes) for p in pairs],
        "extent": [format_size(p.extent.num_bytes) for p in pairs],
        "extent is": ["the LCM" if p.extent.is_lcm else f"{float(p.extent.waste):.2%} waste" for p in pairs],
        "MEU_w (worker blocks)": [f"{p.meu_w:,}" for p in pairs],
        "MEU_m (master blocks)": [f"{p.extent.meu_m:,}" for p in pairs],
        "lending budget": [f"{100 * float(p.lender.budget_part):.4g}%" for p in pairs],
        **({"share of the budget": [f"{100 * float(p.share):.4g}%" for p in pairs]} if shared else {}),
        "extents lent": [f"{p.num_extents:,} of {p.max_extents:,}" for p in pairs],
    }.items():
        table.add_row(label, "", *cells)
    lent_bytes = [*(pair.lent_bytes for pair in pairs), *(r.lent_bytes for r in together)]
    table.add_row("bytes lent", "", *(format_size(num_bytes) for num_bytes in lent_bytes))

    rooms = [
        (room.beside(), 0),
        *((room.beside(p.lender), p.borrower_group) for p in pairs),
        *((r, 0) for r in together),
    ]
    for label, cells in {
        "K_i (master blocks)": [f"{r.borrowed_blocks(group):,}" for r, group in rooms],
        "N_LSC": [f"{r.split(group)[0]:,}" for r, group in rooms],
        "N_RC": [f"{r.split(group)[1]:,}" for r, group in rooms],
        "tokens that fit": [f"{r.sequence_tokens:,}" for r, _ in rooms],
        "longest context": [f"{r.longest_context:,}" for r, _ in rooms],
    }.items():
        table.add_row(label, *cells)
    for label, extents in (("one extent less", -1), ("one extent more", 1)):
        table.add_row(label, "", *(_change_in_tokens(room, pair, extents) for pair in pairs))
    return table


def _pair_name(pair: LendingPair) -> str:
    several = len(pair.lender.division.lendable()) > 1 or len(pair.borrower.groups) > 1
    return f"{pair.lender.name} {pair.lender_group}>{pair.borrower_group}" if several else pair.lender.name


def _change_in_tokens(room: BorrowerRoom, pair: LendingPair, extents: int) -> str:
    tokens = room.sequence_tokens_after(pair, extents)
    return "-" if tokens is None else f"{tokens - room.sequence_tokens:+,} tokens"


def _lending_notes(room: BorrowerRoom) -> Iterator[str]:
    alone, model_limit = room.beside(), room.borrower.max_context_len
    if alone.sequence_tokens:
        times = room.sequence_tokens / alone.sequence_tokens
        yield f"{room.sequence_tokens:,} tokens of one sequence fit, {times:.2f} times those without lending"
    if room.sequence_tokens > model_limit:
        yield f"{room.borrower.name} itself was made for {model_limit:,} tokens"
    for lender in dict.fromkeys(pair.lender.name for pair in room.pairs if pair.lender.tensor_parallel_size > 1):
        yield f"{lender} has several ranks: an extent has a part in the pool of each, and bytes lent are those of all"
    for pair in room.pairs:
        if pair.num_extents == 0:
            yield f"{_pair_name(pair)} lends nothing: {_why_not(pair)}"
    if room.cached_tokens > room.sequence_tokens:
        yield f"{room.cached_tokens:,} tokens of several sequences fit: one alone is limited by N_LSC"


def _why_not(pair: LendingPair) -> str:
    if pair.lender.budget_bytes is None:
        return "it has no lending.budget"
    if not pair.can_lend:
        return "an extent is larger than its pool; try another block_size"
    if not pair.lender.budget_bytes:
        return "its lending.budget is 0; `swiftkv lending set` can raise it at run time"
    return "its share of the budget is less than one extent; raise lending.budget or try another block_size"

"""Mistakes that the tests of the core, the ledgers, the tiers and storage must notice, each a few edits of the sources.

It is one file, for it is one list.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from core_build import ROOT, SOURCES

PACKAGE = ROOT / "swiftkv"


@dataclass(frozen=True)
class Edit:
    """A snippet of a file, which occurs there once, and what replaces it.

    The file is one in `cpp_ext`, or a module of `swiftkv`.
    """

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    name: str
    edits: tuple[Edit, ...]

    @property
    def room(self) -> str:
        return self.edits[0].file.split("/")[0]

    @property
    def is_python(self) -> bool:
        return self.edits[0].file.endswith(".py")

    @property
    def sources(self) -> Path:
        return PACKAGE if self.is_python else SOURCES

    def write(self, to: Path) -> None:
        """Copy the sources and edit the copy."""
        shutil.copytree(self.sources, to)
        for edit in self.edits:
            path = to / edit.file
            text = path.read_text()
            assert text.count(edit.old) == 1, f"{self.name}: not once in {edit.file}: {edit.old}"
            path.write_text(text.replace(edit.old, edit.new))


def one(name: str, file: str, old: str, new: str) -> Mutant:
    return Mutant(name, (Edit(file, old, new),))


BOUNDARIES, CACHE_KEEP = "core/boundaries.cpp", "core/kv_cache_keep.cpp"
POOL, POOL_EXTENTS = "core/block_pool.cpp", "core/block_pool_extents.cpp"
CACHE, CACHE_RELEASE, CACHE_LENDING = "core/kv_cache.cpp", "core/kv_cache_release.cpp", "core/kv_cache_lending.cpp"
CACHE_ROOM, CACHE_HOUSE, DIVISION = "core/kv_cache_room.cpp", "core/kv_cache_house.cpp", "core/division.cpp"
CACHE_STAGING, CACHE_STORAGE = "core/kv_cache_staging.cpp", "core/kv_cache_storage.cpp"
SCHEDULER, LENDING = "core/scheduler.cpp", "core/scheduler_lending.cpp"
STORAGE = "core/scheduler_storage.cpp"
REQUEST, REQUESTS, ROSTER = "core/request.h", "core/request.cpp", "core/roster.cpp"
REFUSAL, BUILDER, POLICY = "core/refusal.cpp", "core/step_builder.cpp", "core/policy.cpp"
PLAN, TREE, SET = "core/plan_writer.cpp", "core/prefix_index.cpp", "core/free_set.h"
BUILDER_H = "core/step_builder.h"
ORDER, ORDER_H, QUEUE = "core/admission_order.cpp", "core/admission_order.h", "core/waiting_queue.cpp"
SHARES = "core/fair_share.h"
STEP_TIME = "core/step_time.cpp"
PATHS = "core/paths.cpp"
PINS = "core/pins.cpp"
LENDER, BORROWER = "lease/lender_ledger.cpp", "lease/borrower_ledger.cpp"
PROMPT_QUEUE, PROMPT_RACE = "core/prompt_queue.cpp", "core/prompt_race.cpp"
DRAFTING, FORECAST_ERRORS = "core/drafting.cpp", "core/forecast_errors.cpp"
RATES, LOADS, LOADER, REACH = "tier/rates.py", "tier/loads.py", "tier/loader.py", "tier/reach.py"
HOST_PINS, LOAD_CHOICE = "tier/host_pins.py", "tier/load_choice.py"
ENVELOPE, LEVELS, BREAKER = "storage/envelope.py", "storage/levels.py", "storage/breaker.py"
FILE_MEDIUM, FILE_INDEX, HOST_MEDIUM = "storage/file_medium.py", "storage/file_index.py", "storage/host_medium.py"
FILE_WRITING = "storage/file_writing.py"
SENT, ENGINE, RULES = "server/sent_prefixes.py", "engine/engine.py", "engine/token_rules.py"
HOST_MEMORY, FILE_READS = "host/host_memory.cpp", "files/file_reads.cpp"

MUTANTS = [
    # Host memory.
    one(
        "a chunk is given back while a step reads it",
        POOL,
        "unpinned_.push_back({chunk_of(block), num_begun_ > num_settled_ ? num_begun_ : 0});",
        "unpinned_.push_back({chunk_of(block), 0});",
    ),
    one(
        "a pin is given back twice",
        POOL,
        "chunks.push_back(unpinned.chunk);",
        "chunks.push_back(unpinned.chunk); chunks.push_back(unpinned.chunk);",
    ),
    one(
        "a chunk that requests still hold is taken again",
        CACHE_STORAGE,
        "== BlockState::kAbsent ? block : kNone;",
        "== BlockState::kAbsent || true ? block : kNone;",
    ),
    one(
        "a block in host memory counts as room",
        CACHE_ROOM,
        "gain.local += pool.place(block) == Place::kLocal;",
        "gain.local += pool.place(block) != Place::kPeer;",
    ),
    one(
        "a pinned block needs room",
        CACHE_STORAGE,
        "block == kNone ? attended_block(g, pinned_chunk(g, i, pinned)) == kNone",
        "block == kNone ? true",
    ),
    one(
        "a block that is verified is not waited for",
        CACHE,
        " ||\n               group.pool.count(Place::kHost, BlockState::kLoading) > 0",
        "",
    ),
    # Steps that copy blocks from host memory.
    Mutant(
        "a pin is given back before the step has copied the block",
        (
            Edit(
                CACHE_STORAGE,
                "groups_[g].moves_up.push_back(copy);",
                "groups_[g].moves_up.push_back(copy); pool.note_unpinned(copy.chunk);",
            ),
            Edit(CACHE_RELEASE, "group.pool.note_unpinned(it->chunk);", ""),
        ),
    ),
    Mutant(
        "a step does not hold the blocks that it copies",
        (
            Edit(CACHE_STORAGE, "pool.add_ref(copy.local);", ""),
            Edit(CACHE_RELEASE, "group.pool.drop_ref(it->local);", ""),
        ),
    ),
    one(
        "a block is copied that was forgotten",
        CACHE_STORAGE,
        "const bool is_wanted = pool.node(copy.local) != kNone;",
        "const bool is_wanted = true;",
    ),
    one(
        "the pin of a block that was forgotten is kept",
        CACHE_STORAGE,
        "pool.note_unpinned(copy.chunk);",
        "",
    ),
    one(
        "a block that a failed step was to copy is here",
        CACHE_RELEASE,
        "for (const ChunkCopy& copy : groups_[g].moves_up) forget(copy.local);",
        "",
    ),
    one(
        "the blocks that moved up first are evicted first",
        CACHE_RELEASE,
        "for (auto it = group.moves_up.rbegin(); it != group.moves_up.rend(); ++it) {",
        "for (auto it = group.moves_up.begin(); it != group.moves_up.end(); ++it) {",
    ),
    one(
        "a block is copied from the chunk of another",
        CACHE_STORAGE,
        "coming.push_back({load.chunk, load.block});",
        "coming.push_back({load.index, load.block});",
    ),
    one(
        "blocks that move up are not told",
        CACHE_STORAGE,
        "tell_loaded(g, copy.local, is_wanted);",
        "",
    ),
    one("host memory has the link of a lender", PLAN, "loads.add(cache_.host_link(),", "loads.add(0,"),
    one(
        "chunks begin where host memory begins",
        PLAN,
        "spec.source.offset_bytes + chunk * block_bytes,",
        "chunk * block_bytes,",
    ),
    one(
        "the layers of a block from host memory lie in one place",
        PLAN,
        "spec.base_offset_bytes + local * block_bytes, false,",
        "spec.base_offset_bytes + local * block_bytes, true,",
    ),
    one(
        "blocks from host memory are loaded when their layer begins",
        PLAN,
        "is_streaming |= cache_.has_moves_up();",
        "",
    ),
    one(
        "a step is planned beside one that copies from host memory",
        CACHE_LENDING,
        " ||\n               !group.moves_up.empty();",
        ";",
    ),
    one(
        "a request is preempted for the room of blocks that a step copies",
        CACHE_ROOM,
        " + static_cast<int>(group.moves_up.size())}",
        "}",
    ),
    one("a request awaits only blocks that are loading", CACHE_ROOM, " && !has_moves_up()", ""),
    one(
        "a refused request does not notice what moves up",
        SCHEDULER,
        "if (cache_.has_moves_up()) refusal_.forget();",
        "",
    ),
    one(
        "blocks from host memory go before what lenders want back",
        SCHEDULER,
        "    if (cache_.has_copies()) return open(step);\n    move_up();",
        "    move_up();\n    if (cache_.has_copies()) return open(step);",
    ),
    # Pins.
    one(
        "a pin keeps blocks that a lender may want back",
        CACHE,
        "return is_attended(g, block) && groups_[g].pool.state(block)",
        "return groups_[g].pool.state(block)",
    ),
    one(
        "a pin keeps blocks that are loading",
        CACHE,
        "return is_attended(g, block) && groups_[g].pool.state(block) != BlockState::kLoading;",
        "return is_attended(g, block);",
    ),
    one("a pin beyond the share is kept", PINS, "length == 0 || share_with_it > max_share", "length == 0"),
    one(
        "a block that two pins hold counts twice",
        "core/pins.h",
        "{ return static_cast<int>(num_holders_[group].size()); }",
        "{\n        int sum = 0;\n        for (const auto& [key, count] : num_holders_[group]) sum += count;\n"
        "        return sum;\n    }",
    ),
    one("a block that one of two pins leaves is not pinned", PINS, "if (held->second == 0)", "if (by < 0)"),
    one(
        "what a pin held counts when it has ended",
        PINS,
        "    count(pin, -1);\n    cache_.release",
        "    cache_.release",
    ),
    one(
        "a request that is alone waits for the end of a pin",
        BUILDER,
        "if (roster_.num_running() == 1 && pins_.give_way()) continue;",
        "",
    ),
    one(
        "pinned blocks move and their pin does not notice",
        BUILDER,
        "for (BlockTable* pinned : pins_.tables()) tables.push_back(pinned);",
        "",
    ),
    one("a pin whose bytes were lost stays", PINS, "if (cache_.is_indexed(pin.table)) return false;", "return false;"),
    # Write-back.
    one(
        "nothing is written back before the pool is full",
        CACHE_STORAGE,
        "/ kNumPartsOfPool - num_free;",
        "/ kNumPartsOfPool * 0 - num_free;",
    ),
    one(
        "what was used last is written back first",
        "core/block_pool.h",
        "for (BlockId b = records_[end].newer; b != end; b = records_[b].newer)\n                    if (!visit(b))",
        "for (BlockId b = records_[end].older; b != end; b = records_[b].older)\n                    if (!visit(b))",
    ),
    one(
        "free extents are no room, and blocks are written back early",
        CACHE_STORAGE,
        "pool.num_free(Place::kPeer) + division_.unclaimed(g);",
        "pool.num_free(Place::kPeer);",
    ),
    one(
        "room at lenders is none, and blocks are written back early",
        CACHE_STORAGE,
        "pool.num_free(Place::kLocal) + pool.num_free(Place::kPeer)",
        "pool.num_free(Place::kLocal)",
    ),
    one(
        "what goes with a block is not written back",
        CACHE_STORAGE,
        "if (h == g || groups_[g].spec.window == 0) is_new",
        "if (h == g) is_new",
    ),
    one(
        "of a tail a part is written back",
        CACHE_STORAGE,
        "if (groups_[h].spec.window > 0) offer(h, beside);",
        "if (false) offer(h, beside);",
    ),
    one(
        "windows that no boundary keeps are written back",
        CACHE_STORAGE,
        "return groups_[g].spec.window == 0 || groups_[g].pool.worth(block) != Worth::kNone;",
        "return true;",
    ),
    one(
        "what leaves before it is written back is not counted",
        CACHE_KEEP,
        "if (is_lost_unstored(h, node)) offers_.count_dropped();",
        "",
    ),
    one(
        "what was evicted counts as stored when it comes again",
        CACHE_KEEP,
        "        offers_.forget(node, h);\n",
        "",
    ),
    one(
        "the rest is offered from the end of what was used first",
        CACHE_STORAGE,
        "for (auto it = nodes.rbegin(); it != nodes.rend(); ++it) offer_groups(*it);",
        "for (NodeId node : nodes) offer_groups(node);",
    ),
    one(
        "of the rest, windows are offered last",
        CACHE_STORAGE,
        "it != nodes.rend(); ++it) offer_groups(*it);",
        "it != nodes.rend(); ++it) offer(g, *it);",
    ),
    # Loads without room.
    one(
        "a load without room makes what it found the last to be evicted",
        CACHE_STORAGE,
        "    let_go_of(held, &BlockPool::undo_ref);",
        "    let_go_of(held, &BlockPool::drop_ref);",
    ),
    one(
        "a load is refused after a larger one",
        CACHE_STORAGE,
        "no_room_->wanted.begin(), std::greater_equal<>())",
        "no_room_->wanted.begin(), [](int, int) { return true; })",
    ),
    one(
        "a load is refused beside what is kept no longer",
        CACHE_STORAGE,
        "    return next == no_room_->kept.end();",
        "    return true;",
    ),
    one(
        "a load is refused when blocks have been let go",
        CACHE_STORAGE,
        "!no_room_ || no_room_->num_moves != num_moves()",
        "!no_room_",
    ),
    # The front of a prompt is computed while storage loads its back.
    one(
        "a request goes on behind a back that is still loading",
        CACHE_STORAGE,
        "is_here &= is_coming && groups_[g].pool.state(block) != BlockState::kLoading;",
        "is_here &= is_coming;",
    ),
    one(
        "what a lender has of a back counts",
        CACHE_STORAGE,
        "is_coming = block != kNone && is_attended(g, block);",
        "is_coming = block != kNone;",
    ),
    one(
        "a front keeps its blocks beside those of its back",
        CACHE_STORAGE,
        "            let_go(g, block_of(g, entries.back()));\n",
        "            ;\n",
    ),
    one(
        "a request goes on behind its back while a step computes its front",
        BUILDER,
        "        if (r.num_scheduled > 0) return 0;\n",
        "",
    ),
    one(
        "a front runs into its back",
        BUILDER,
        "const int end = back.coming > next ? back.coming : next + blocks_to_meet(r, next, back.here);",
        "const int end = back.here;",
    ),
    one("a back that does not come is waited for", BUILDER, "if (back.coming == r.back_end) {", "if (false) {"),
    one(
        "who computes its front takes blocks for its whole prompt",
        BUILDER,
        "return r.back_end > 0 ? r.num_planned() + num_tokens : r.num_tokens();",
        "return r.num_tokens();",
    ),
    one(
        "a front takes the room of what comes behind it",
        BUILDER,
        "return std::max(0, num_left - (back.here - back.coming));",
        "return 0;",
    ),
    one(
        "a front takes the room of the back that is here",
        BUILDER,
        "return std::max(0, num_left - (back.here - back.coming));",
        "return std::max(0, num_left - (r.back_end - back.coming));",
    ),
    one(
        "a back takes the room of its front",
        STORAGE,
        "(roster_.running()), num_to_compute};",
        "(roster_.running()), 0};",
    ),
    one(
        "a front needs room for all of itself in windows",
        "core/kv_cache.h",
        "return each + (spec.window == 0 ? full : 0);",
        "return each + full;",
    ),
    one(
        "a back needs more of a window than its tail",
        CACHE_STORAGE,
        "            if (i < first_of_match(g, length)) continue;\n",
        "",
    ),
    one(
        "a request goes on behind a back without the tail of its window",
        CACHE_STORAGE,
        "            if (i < first_of_match(g, length)) continue;\n",
        "            if (groups_[g].spec.window > 0) continue;\n",
    ),
    one(
        "a front keeps the window that its back has passed",
        CACHE_STORAGE,
        "            let_go(g, block_of(g, entries[first]));\n",
        "            ;\n",
    ),
    one(
        "who is preempted still waits for its back",
        ROSTER,
        "r.num_computed = r.back_end = 0;",
        "r.num_computed = 0;",
    ),
    one("what others load takes no time", RATES, "(num_computed) + queued_bytes)", "(num_computed))"),
    one(
        "a prompt is divided where that gains nothing",
        RATES,
        " and both_s <= _WORTH * min(load_all_s, compute_all_s)",
        "",
    ),
    one("a back is late", RATES, ">= (load_s(num_computed) or 0.0)", ">= 0.5 * (load_s(num_computed) or 0.0)"),
    one(
        "a front never waits",
        BUILDER,
        "return static_cast<int>(std::ranges::partition_point(",
        "return 1 + static_cast<int>(std::ranges::partition_point(",
    ),
    one(
        "a front waits for storage that stalls",
        BUILDER,
        "if (!r.front_slowness) r.front_slowness = ",
        "r.front_slowness = ",
    ),
    one(
        "a front takes the tail of a window for any other block",
        CACHE_STORAGE,
        "num_bytes += int64_t{num_blocks} * group.num_layers * group.layer_block_bytes;",
        "num_bytes += num_blocks;",
    ),
    one(
        "a back is read from its first block on",
        LOADS,
        "np.lexsort(by_index)[::-1]",
        "np.lexsort(by_index)",
    ),
    one(
        "who has passed its back is not noticed",
        LOADS,
        "            elif self._has_passed_back(wait):",
        "            elif False:",
    ),
    # The block pool.
    one("a block that a step still uses is free", POOL, "if (records_[block].busy_until > 0) {", "if (false) {"),
    one(
        "a retired block stays busy for a step too few",
        POOL,
        "std::exchange(record(block).busy_until, num_begun_)",
        "std::exchange(record(block).busy_until, std::max<int64_t>(1, num_begun_ - 1))",
    ),
    one(
        "the newest block is evicted first",
        POOL,
        "++end;\n    return records_[end].newer;",
        "++end;\n    return records_[end].older;",
    ),
    one("an extent in use is lent", POOL_EXTENTS, "lend.num_occupied[extent] > 0 || is_found", "is_found"),
    one(
        "all blocks of an extent lie at its begin", POOL_EXTENTS, "+ within * block_bytes", "+ 0 * within * block_bytes"
    ),
    one("a lost extent is returned", POOL_EXTENTS, "if (!is_lost) link.returned", "link.returned"),
    one(
        "a recall leaves free blocks behind",
        POOL_EXTENTS,
        "if (state(b) == BlockState::kFree) give_up(b);\n        if",
        "if",
    ),
    # The set of free blocks.
    one(
        "the highest member is the lowest of its word",
        SET,
        "kBits - 1 - std::countl_zero(below)",
        "std::countr_zero(below)",
    ),
    one("a word that is empty is not noted", SET, "if (word != 0) return;", "return;"),
    # The cache.
    one(
        "a window's match lacks a block",
        CACHE,
        "std::min(length, groups_[g].num_tail)",
        "std::min(length, groups_[g].num_tail - 1)",
    ),
    one(
        "a window is left a block too early",
        CACHE_RELEASE,
        "num_computed / block_size_ - groups_[g].num_tail - 1;",
        "num_computed / block_size_ - groups_[g].num_tail + 1;",
    ),
    one(
        "an equal prompt that ends with a block finds its window gone",
        CACHE_RELEASE,
        "groups_[g].num_tail - 1;",
        "groups_[g].num_tail;",
    ),
    one("the query itself must be cached", "core/types.h", "window_group.window - 1,", "window_group.window,"),
    # What is kept in windows.
    one(
        "what leaves a window is as good as what is kept",
        "core/block_pool.h",
        "static_cast<int>(place) * kNumWorths + static_cast<int>(worth);",
        "static_cast<int>(place) * kNumWorths + 0 * static_cast<int>(worth);",
    ),
    one("a prompt's end is not kept", "core/policy.h", "is_within(prompt_end))", "false)"),
    one("a branch is not kept", "core/policy.h", "if (is_within(r.num_shared_blocks))", "if (false)"),
    one("an answer's end is not kept", ROSTER, "if (cache_.has_windows()) cache_.keep", "if (false) cache_.keep"),
    one("regular boundaries stay for good", "core/policy.h", "Worth::kInterval);", "Worth::kKept);"),
    one("a boundary outlives its tail", BOUNDARIES, "if (needs(group, distance)) broken.push_back(number);", ";"),
    one("a boundary outlives what lies far below it", PATHS, "gone.push_back(behind);", "break;"),
    one("a boundary goes with the block below it", BOUNDARIES, "if (needs(group, distance)) broken", "broken"),
    one(
        "a boundary keeps no block below its tail",
        BOUNDARIES,
        "if (distance > num_tails_[group]) continue;",
        "if (distance >= num_tails_[group]) continue;",
    ),
    one(
        "a boundary is kept that cannot be used",
        CACHE_KEEP,
        "(node == kNone || index_.block(node, g) == kNone)) return;",
        "node == kNone) return;",
    ),
    one(
        "a block that comes back to a boundary is not part of it",
        CACHE,
        "if (groups_[g].spec.window > 0) pool.set_worth(own, boundaries_.worth(node, g));",
        "",
    ),
    one(
        "what is worth less than before is the last to go",
        POOL,
        "link_before(goes_first ? records_[end].newer : end,",
        "link_before(end,",
    ),
    one(
        "what is offered is not looked at again when it is the first to go",
        POOL,
        "if (goes_first && !is_seen) forget_seen(list_of(end));",
        "",
    ),
    one(
        "what was seen is seen for good",
        POOL,
        "linked.is_seen = false;",
        "",
    ),
    one(
        "what is put back where it stood is seen again",
        POOL,
        "link_before(before.newer, block, before.is_seen);",
        "link_before(before.newer, block);",
    ),
    one(
        "a chunk does not shrink",
        POLICY,
        "if (!splits_prompts() || !cache_.has_windows()) return wanted;",
        "return wanted;",
    ),
    one(
        "a chunk takes the blocks that others want next",
        CACHE_ROOM,
        "std::max(0, available(g) - spare.of(spec(g)) - overdraft(g));",
        "std::max(0, available(g) - overdraft(g));",
    ),
    one(
        "a regular boundary pushes out what is kept",
        CACHE,
        "return has_free || pool.worth(oldest) <= pool.worth(cached);",
        "return true;",
    ),
    # Groups that share extents.
    one(
        "an extent stays with a group that does not need it",
        POOL_EXTENTS,
        "if (is_freed && is_empty(house_extent(local))) leave(house_extent(local));",
        "",
    ),
    one(
        "an extent goes back while it holds what is cached",
        POOL_EXTENTS,
        "return held.num_occupied + held.num_cached + held.num_kept == 0;",
        "return held.num_occupied + held.num_kept == 0;",
    ),
    one(
        "extents are counted for two groups",
        DIVISION,
        "house_->num_free() - missing_extents(wanted);",
        "house_->num_free();",
    ),
    one(
        "blocks that move in get their extents when others have taken blocks",
        CACHE_HOUSE,
        "for (int g = 0; g < num_groups(); ++g) entered[g] += overdraft(g);",
        "",
    ),
    one(
        "a group gives up what it is about to take",
        DIVISION,
        "pool.available(Place::kLocal) - wanted[h] < pool.house_extent_blocks()",
        "false",
    ),
    one(
        "a group takes an extent that another lacks",
        CACHE_HOUSE,
        "own == kNone ? 0 : division_.missing_extents(wanted)",
        "0",
    ),
    one(
        "the newest goes before the oldest of another group",
        DIVISION,
        "cached_at(a) - cached_at(b)) < 0;",
        "cached_at(a) - cached_at(b)) > 0;",
    ),
    one(
        "a group empties its own extents alone",
        CACHE_HOUSE,
        "if (donor == kNone) return own;",
        "return own;",
    ),
    one(
        "used blocks keep their extents",
        CACHE_HOUSE,
        "if (!division_.fits(wanted, Means::kCompaction) ||",
        "if (true ||",
    ),
    one(
        "an extent changes hands before it is copied",
        CACHE,
        "group.pool.keep_extent_of(cached);",
        "",
    ),
    one(
        "blocks move to where a copy is still read",
        CACHE_HOUSE,
        "if (!division_.is_shared() || has_copies())",
        "if (!division_.is_shared())",
    ),
    one("windows have no room but what histories leave", DIVISION, "- (borrows() ? extents_for_windows_ : 0)", ""),
    one(
        "what cannot be staged comes last",
        CACHE,
        "for (int g = 0; division_.is_shared() && g < num_groups(); ++g)",
        "for (int g = 0; false && g < num_groups(); ++g)",
    ),
    one(
        "a block that moves is looked for where it was",
        CACHE_HOUSE,
        "moved.emplace(entry_of(g, from), entry_of(g, to));",
        "",
    ),
    one(
        "the prefix index does not know where a block has moved",
        CACHE_HOUSE,
        "if (const NodeId node = pool.node(from); node != kNone) index_.set_block(node, g, to);",
        "",
    ),
    one("a block that has moved is not copied", CACHE_HOUSE, "local_moves_.push_back({g, from, to});", ""),
    one("a move is made again in the step after", CACHE_RELEASE, "local_moves_.clear();", ""),
    one(
        "a step is planned beside moves",
        SCHEDULER,
        "cache_.has_copies() || !cache_.local_moves().empty();",
        "cache_.has_copies();",
    ),
    one(
        "a block is loaded to where another has not left",
        LENDING,
        "is_step_copying() || roster_.awaits_loads() ?",
        "roster_.awaits_loads() ?",
    ),
    one(
        "an extent is lent from which a block is still moving",
        LENDING,
        "if (cache_.shares_extents() && is_step_copying()) return {};",
        "",
    ),
    one(
        "an extent of groups is lent while something pins it",
        DIVISION,
        "if (!pool.is_open(extent)) return std::nullopt;",
        "",
    ),
    one(
        "what is used last is lent first",
        DIVISION,
        "return goes_before(a.first, b.first);",
        "return goes_before(b.first, a.first);",
    ),
    one(
        "a request counts on what is lent",
        DIVISION,
        "lender.spec.num_blocks - lender.pool.count(Place::kLocal, BlockState::kLent);",
        "lender.spec.num_blocks;",
    ),
    one(
        "the demand for extents leaves out what part of them others take",
        "core/types.h",
        "ceil_div(num_blocks, spec.blocks_per_extent) + (spec.blocks_per_extent > 1);",
        "ceil_div(num_blocks, spec.blocks_per_extent);",
    ),
    one(
        "a block that a failed step was to move is where it was to come",
        CACHE_RELEASE,
        "            if (move.group == g) forget(move.to);\n",
        "            if (false) forget(move.to);\n",
    ),
    one("what the step after uses is let go at once", CACHE_RELEASE, "if (num_steps_ > 1) {", "if (false) {"),
    one(
        "a loading block is read", CACHE, "== BlockState::kLoading) return true;", "== BlockState::kLoading) continue;"
    ),
    one(
        "what never came is cached",
        CACHE,
        "if (!is_loaded && groups_[g].pool.node(blocks[g]) != kNone)",
        "if (false)",
    ),
    one(
        "a request computes the same tokens in every step",
        BUILDER,
        "return r.skip_prefix_match && ",
        "return false && ",
    ),
    one(
        "a request waits for loads that do not help it",
        CACHE_ROOM,
        "return has_room_with(gains, table, chunk_end, prompt_end, 0);",
        "return true;",
    ),
    one("one load after the other takes the room", STORAGE, "    if (roster_.awaits_loads()) return {};\n", ""),
    one("a computed block waits for one that loads", CACHE, " || pool.state(known) == BlockState::kLoading", ""),
    one("two blocks have one node", CACHE, "            pool.forget(known);\n", ""),
    one(
        "blocks are borrowed that cannot be staged",
        CACHE_ROOM,
        "return num_staging_layer_blocks(g) - groups_[g].pool.count(Place::kPeer, BlockState::kUsed);",
        "return num_staging_layer_blocks(g);",
    ),
    one("a node loses one block alone", CACHE_KEEP, "(h != g && !whole_node)", "h != g"),
    # The cache and leases.
    one(
        "what a lost extent was to bring counts",
        CACHE_LENDING,
        "if (pool.is_lost(copy.borrowed)) missing.push_back(copy.local);",
        ";",
    ),
    one(
        "a block is staged in before it is spilled",
        CACHE_STAGING,
        "if (group.spills.size() > num_spills) ++group.num_fresh;",
        "",
    ),
    one(
        "what is cached in a recalled extent stays there",
        CACHE_LENDING,
        "if (!has_room || move_in(g, block) == kNone) evict(g, block);",
        "if (has_room) move_in(g, block);",
    ),
    one(
        "a drain counts on room that is not there",
        CACHE_LENDING,
        "num_used > pool.available(Place::kLocal) + elsewhere) return {};",
        "num_used > 2 * pool.available(Place::kLocal) + elsewhere) return {};",
    ),
    Mutant(
        "a recalled block is evicted to make room",
        (
            Edit(POOL_EXTENTS, "if (state(b) == BlockState::kCached) move_to(b, BlockState::kLeaving);", ""),
            Edit(POOL, "is_leaving(block) ? BlockState::kLeaving : BlockState::kCached", "BlockState::kCached"),
            Edit(
                CACHE_LENDING,
                "drain_cached(g, leaving(g, BlockState::kLeaving)",
                "drain_cached(g, leaving(g, BlockState::kCached)",
            ),
            Edit(
                CACHE_LENDING, "pool.state(block) != BlockState::kLeaving", "pool.state(block) != BlockState::kCached"
            ),
            Edit(CACHE_STAGING, "if (is_draining()) return;", ""),
            Edit(
                LENDING,
                "cache_.shrink_staging();\n    if (cache_",
                "cache_.shrink_staging();\n    cache_.grow_staging();\n    if (cache_",
            ),
            Edit(
                "core/invariants.cpp", 'check_that(is_local || !is_leaving(b), "a cached', 'check_that(true, "a cached'
            ),
            Edit(SET, "if (empty()) return -1;", ""),
        ),
    ),
    # The prefix index.
    one("a node that goes is lost", TREE, "nodes_[node].next = free_nodes_;", ""),
    one("a node with a block of the second group goes", TREE, "first, first + num_groups_,", "first, first + 1,"),
    # The scheduler.
    one("blocks of a step in progress are released", ROSTER, "if (r.num_scheduled > 0) {", "if (false) {"),
    one(
        "a request goes on while its last token is sampled",
        REQUEST,
        "return num_unknown > 0 && num_tokens() >= last_len;",
        "return false;",
    ),
    one("a prompt is matched whole", REQUEST, "(num_tokens() - 1) / block_size", "num_tokens() / block_size"),
    one("a step is planned beside copies", SCHEDULER, "!open_.back().has_copies && ", ""),
    one("a request may stop too late", REQUESTS, ">= min_tokens", "> min_tokens"),
    one("what failed copies wrote counts", SCHEDULER, "cache_.settle_failed();", "cache_.settle();"),
    one("a step that reads what is lost counts", LENDING, "row.request && reads_lost(row)", "false"),
    one("who holds what is lost goes on", LENDING, "if (!cache_.holds_lost(r->table)) continue;", "continue;"),
    # Drafts.
    one("a wrong guess counts", SCHEDULER, "if (i > 0 && sampled[i - 1] != row.draft[i - 1]) break;", ""),
    one(
        "KV of wrong guesses counts",
        SCHEDULER,
        "r.num_computed += row.num_tokens - num_rejected;",
        "r.num_computed += row.num_tokens;",
    ),
    one("blocks of wrong guesses stay", SCHEDULER, "if (num_rejected > 0) cache_.trim", "if (false) cache_.trim"),
    one("a draft outlives a token", REQUESTS, "    draft.clear();\n", ""),
    one("a draft outlives a lookup", SCHEDULER, "r->draft.clear();", ""),
    one("a draft follows what is not known", POLICY, "if (r.num_planned() != r.num_known()) return 0;", ""),
    one("an answer grows beyond its end", POLICY, "r.last_len - r.num_known() - 1", "r.last_len"),
    one("a draft exceeds the budget of its step", BUILDER, "std::min(budget_left_, policy_", "(policy_"),
    one("a step samples as much as it likes", BUILDER, "policy_.max_samples() - num_samples", "budget_left_"),
    one("guesses take the blocks that others want next", BUILDER, "end + wanted, spare)", "end + wanted, 0)"),
    one(
        "only the last guess is sampled behind",
        PLAN,
        "int back = row.num_samples(); back > 0",
        "int back = 1; back > 0",
    ),
    one("the earliest match is copied", DRAFTING, "length > best.length)", "length >= best.length)"),
    one("any match will do", DRAFTING, "length >= lookup.shortest && ", ""),
    one("guesses behind a wrong one count", DRAFTING, "std::min(num_right + 1, num_guesses)", "num_guesses"),
    one("a row of guesses is a prompt", PLAN, "static_cast<int>(row.draft.size()));", "0);"),
    one("guesses are no rows", STEP_TIME, "num_rows += 1 + num_guesses;", "num_rows += 1;"),
    one("all guesses are worth their time", POLICY, "if (tokens_per_s <= fastest) continue;", ""),
    one(
        "the first guess that does not pay ends a draft",
        POLICY,
        "(tokens_per_s <= fastest) continue",
        "(tokens_per_s <= fastest) break",
    ),
    one("prompts leave no time for guesses", BUILDER, " - policy_.guesses_s(num_guesses)", ""),
    one(
        "nothing is drafted behind a prompt",
        SCHEDULER,
        "if (!r->has_answer()) continue;",
        "if (r->has_answer()) continue;",
    ),
    # The time of a step.
    one("a coefficient is negative", STEP_TIME, "if (found[lowest] >= 0) {", "if (true) {"),
    one(
        "decodes make the model forget prompts", STEP_TIME, "(work.prompt_pairs > 0 ? prompts_ : decodes_)", "prompts_"
    ),
    one(
        "a long chunk is as cheap per token as a short one",
        STEP_TIME,
        "(begin + 0.5 * static_cast",
        "(begin + 0 * static_cast",
    ),
    one("old steps count for ever", "core/step_time.h", "latest_{0.99,", "latest_{1.0,"),
    one("the curve is not asked", STEP_TIME, "work.num_tokens > 0 ? curve_.at", "false ? curve_.at"),
    one("a curve keeps old steps for ever", "core/step_time.h", "0.99, 1 - 1.0 / 256", "0.99, 1"),
    one("copies alone count as the fewest tokens", STEP_TIME, "if (work.num_tokens == 0) return;", ""),
    one("a point of a curve knows nothing of the others", STEP_TIME, "kNeighbour = 1.0 / 32", "kNeighbour = 0"),
    one("decodes have no pace", STEP_TIME, "is_of_decodes(work) ? pace_ : 1", "1"),
    one("prompts go by the pace of decodes", STEP_TIME, "is_of_decodes(work) ? pace_ : 1", "pace_"),
    one(
        "an interruption sets the pace",
        STEP_TIME,
        "limited(duration_s / expected_s, 1) - pace_",
        "duration_s / expected_s - pace_",
    ),
    one(
        "absolute errors count",
        STEP_TIME,
        "const double unit_s = limited(expected_s, duration_s);",
        "const double unit_s = 1.0;",
    ),
    one("steps that took long by chance count less", STEP_TIME, "steady_s > 0) expected_s", "false) expected_s"),
    one(
        "an interruption counts in full",
        STEP_TIME,
        "constexpr double kInterrupted = 2;",
        "constexpr double kInterrupted = 100;",
    ),
    one(
        "what is usual is not learnt",
        STEP_TIME,
        "for (StepFit* fit : {&latest_, &usual_}) fit->add(work, duration_s, expected_s);",
        "latest_.add(work, duration_s, expected_s);",
    ),
    one(
        "what was learnt elsewhere is not usual",
        STEP_TIME,
        "for (StepFit* fit : {&step_time.latest_, &step_time.usual_}) fit->add(work, duration_s, duration_s);",
        "step_time.latest_.add(work, duration_s, duration_s);",
    ),
    one(
        "errors of long ago count",
        STEP_TIME,
        "std::min(num_predicted_ + 1, kErrorWindow);",
        "num_predicted_ + 1;",
    ),
    # The errors of forecasts.
    one(
        "forecasts unlike it count",
        FORECAST_ERRORS,
        "std::abs(noted.octave_left - octave_left) + std::abs(noted.octave_forecast - octave_forecast) <",
        "std::abs(noted.octave_left - octave_left) <",
    ),
    one("errors of long ago stay", FORECAST_ERRORS, "num_noted_++ % kRecent", "std::min(num_noted_++, kRecent - 1)"),
    one("an allowance is for one more", FORECAST_ERRORS, "double>(num_alike))) - 1;", "double>(num_alike)));"),
    one("few errors are enough", FORECAST_ERRORS, "num_alike < kLeastAlike", "!num_alike"),
    # Steps that are bounded in time.
    one("a step has no end", POLICY, "(!limits_.target_tpot_s || decodes.num_rows == 0)", "(true)"),
    one(
        "prompts alone are bounded", POLICY, "!limits_.target_tpot_s || decodes.num_rows == 0", "!limits_.target_tpot_s"
    ),
    one("prompts starve beside slow decodes", POLICY, "2 * step_time_.predict(decodes)", "0.0"),
    one(
        "a chunk is shorter than a block",
        POLICY,
        "std::max(limits_.block_size, step_time_.longest",
        "(step_time_.longest",
    ),
    one("every prompt gets its block", BUILDER_H, "is_full() || !policy_.has_time(work_, limit_s_)", "is_full()"),
    one("nobody probes", POLICY, "kProbeBlocks = 4;", "kProbeBlocks = 400;"),
    one("long prompts begin together", POLICY, "(!is_long_one || num_long <", "(true || num_long <"),
    # The forecast's queue of prompts.
    one(
        "the prompt that began last is computed",
        PROMPT_QUEUE,
        "if (!interrupts()) return &prompt;",
        "if (!interrupts()) {\n            first = &prompt;\n            continue;\n        }",
    ),
    one(
        "prompts are kept in the order in which they come",
        PROMPT_QUEUE,
        "entries_.insert(entries_.begin() + static_cast<ptrdiff_t>(index_of(id)), {id, prompt});",
        "entries_.push_back({id, prompt});",
    ),
    one(
        "one prompt of long ago stays among the latest",
        PROMPT_QUEUE,
        "latest_.size() < kRecent",
        "latest_.size() <= kRecent",
    ),
    one(
        "who goes first gets all time, also beyond its own",
        PROMPT_QUEUE,
        "std::min(elapsed_s, rest_of(*first, *pace).service_s);",
        "elapsed_s;",
    ),
    one(
        "who goes first is chosen by its whole length",
        PROMPT_QUEUE,
        "order_of(prompt, rest.num_left);",
        "order_of(prompt, prompt.num_left);",
    ),
    one(
        "time that nobody could know of is credited later",
        PROMPT_QUEUE,
        "    advanced_s_ = now_s;\n",
        "    if (pace) advanced_s_ = now_s;\n",
    ),
    one(
        "a prompt that takes longer than expected gives time back",
        PROMPT_QUEUE,
        "const double done_s = std::min(prompt.done_s, service_s),",
        "const double done_s = prompt.done_s,",
    ),
    one(
        "a class reaches into the next one",
        PROMPT_QUEUE,
        "ahead.num_begun += other.has_begun && static_cast<double>(other.priority) < end;",
        "ahead.num_begun += other.has_begun && static_cast<double>(other.priority) <= end;",
    ),
    one(
        "the last weight of a flow counts",
        PROMPT_QUEUE,
        "std::max(flow->weight, other.flow_weight);",
        "other.flow_weight;",
    ),
    one(
        "prompts of a flow's own that are not ahead count as ahead",
        PROMPT_QUEUE,
        "if (rests[i].before > 0 && other.flow == prompt.flow) own_s",
        "if (other.flow == prompt.flow) own_s",
    ),
    one(
        "prompts of a lane go in any order",
        PROMPT_RACE,
        "swiftkv::lane_of(static_cast<int>(r.num_left))",
        "0 * swiftkv::lane_of(static_cast<int>(r.num_left))",
    ),
    one(
        "a prompt is interrupted within a step",
        PROMPT_RACE,
        "std::max(std::ceil(from_s / step_s - 1e-9), 1.0)",
        "std::max(from_s / step_s, 1.0)",
    ),
    one(
        "who arrives waits for nobody of its lane",
        PROMPT_RACE,
        "if (!heads[own_lane_]) racers_.push_back",
        "racers_.push_back",
    ),
    one("long prompts of its lane do not count", PROMPT_RACE, "return num_longer_of_lane_ == 0 &&", "return"),
    one(
        "who is left behind is forgotten at once",
        PROMPT_RACE,
        "< time_s_ * r.now.num_left;",
        "< 4 * time_s_ * r.now.num_left;",
    ),
    one(
        "tokens take the same time wherever they are",
        PROMPT_QUEUE,
        "2 * done_s / std::max(first_s + next_s, kNoTime)",
        "done_s / std::max(first_s, kNoTime)",
    ),
    one(
        "who comes later takes all of a wait",
        PROMPT_QUEUE,
        "return std::min(overtaking_s / span_s, most);",
        "return overtaking_s / span_s;",
    ),
    # The order of those that wait.
    one("lengths count, not waiting", ORDER, "(moment.now_s - r.arrival_s) / r.num_left()", "-r.num_left()"),
    one("it is never the turn of the oldest", ORDER_H, "oldest_lack_tokens_ > 0", "false"),
    one(
        "a turn of the oldest does not count",
        ORDER_H,
        "is_oldest_first ? -num_tokens :",
        "is_oldest_first ? 0 :",
    ),
    one("a forecast lets no longer prompt take turns", PROMPT_QUEUE, "turns_s += rests[i].service_s;", "{}"),
    one("a longer prompt takes all turns", PROMPT_QUEUE, "turns_s -= taken_s;", ""),
    one("deadlines do not count", ORDER, "{ return -r.deadline_s; }", "{ return 0 * r.num_left(); }"),
    one(
        "all lengths are one lane",
        ORDER,
        "// Lanes are those of ShortestAndOldestAlternately.\nclass HighestRatioFirst : public AdmissionOrder {\n"
        "    int lane(const Request& r) const override { return lane_of(r.num_left()); }",
        "class HighestRatioFirst : public AdmissionOrder {\n"
        "    int lane(const Request& r) const override { return 0 * r.num_left(); }",
    ),
    one("what is cached counts", QUEUE, "    r.num_expected = num_known(r) * cache_.block_size();\n", ""),
    one("what comes to be cached counts", QUEUE, "num_moves += refresh(request);", ""),
    one(
        "all who wait for a beginning move, if not at once",
        QUEUE,
        "if (num_moves == kMaxMoves) return;",
        "if (num_moves == kMaxMoves) break;",
    ),
    one("what is cached later counts", SCHEDULER, "if (step.may_seat()) roster_.refresh_waiting();", ""),
    one("what is evicted is expected", CACHE, "index_.find(keys[known - 1]) == kNone", "false"),
    one("nobody goes before a prompt in part", SCHEDULER, " step.admit_before_prefills();", " {}"),
    one(
        "prompts in part go by arrival",
        BUILDER,
        "    if (order_.interrupts_prompts())\n        std::sort",
        "    if (false)\n        std::sort",
    ),
    one("who is held begins", QUEUE, "if (key.is_held) continue;", ""),
    Mutant(
        "many that are held hide others",
        (
            Edit(QUEUE, "if (key.is_held) continue;", ""),
            Edit(BUILDER, "if (!policy_.may_begin(*r", "if (r->is_held || !policy_.may_begin(*r"),
        ),
    ),
    one("who finds no room holds others up for ever", POLICY, "kHoldS = 1.0;", "kHoldS = 1e9;"),
    one("who finds no room is passed for ever", POLICY, ") % 2 == 0;", ") < 1;"),
    one(
        "a request that was refused once holds others up at once",
        ROSTER,
        "r.stuck_since_s = r.refused_since_s = std::nullopt;",
        "r.stuck_since_s = std::nullopt;",
    ),
    one(
        "who has waited for a slot has waited for room",
        SCHEDULER,
        "        if (policy_.could_hold(*r)) r->stuck_since_s.reset();\n",
        "        if (policy_.could_hold(*r)) continue;\n",
    ),
    one(
        "priorities count where arrival does",
        REQUESTS,
        "limits.policy == SchedulingPolicy::kFcfs ? 0 : n.priority",
        "n.priority",
    ),
    # The requests that make room for those before them.
    one(
        "a prompt in part waits for the end of an answer behind it",
        BUILDER,
        "if (must_commit_ || victim.begun >= num_begun_) return 0;",
        "if (victim.num_scheduled > 0) return 0;",
    ),
    one("who has only just begun is preempted", BUILDER, "must_commit_ || victim.begun >= num_begun_", "must_commit_"),
    one(
        "who is in the step and in one in progress is not waited for",
        BUILDER,
        "if (must_commit_ || victim.begun",
        "if (std::exchange(must_commit_, must_commit_ && !victim.is_in_step) || victim.begun",
    ),
    # Who gives way to a higher class.
    one(
        "equals displace each other",
        POLICY,
        "class_of(priority) < class_of(running",
        "class_of(priority) <= class_of(running",
    ),
    one("who was displaced does not get on", POLICY, "|| r->num_known() > r->displaced_len;", "|| true;"),
    one("batch work stays", POLICY, "class_of(r->priority) == kBatchClass || r", "r"),
    one("answers leave before prompts", POLICY, "r->has_answer(), -r->begun", "!r->has_answer(), -r->begun"),
    one("who began first leaves", POLICY, "r->has_answer(), -r->begun", "r->has_answer(), r->begun"),
    one("the highest class leaves first", POLICY, "std::tuple(-class_of(", "std::tuple(class_of("),
    one(
        "what others hold too is a gain",
        CACHE_ROOM,
        "if (++num_gone[block] < pool.refs(block) || pool.is_busy(block)) continue;",
        "if (pool.is_busy(block)) continue;",
    ),
    one(
        "what has gone before is gone again",
        CACHE_ROOM,
        "gone->groups[g].entries[i])] = 0;",
        "gone->groups[g].entries[i])];",
    ),
    one("all leave for one", BUILDER, "    candidates.resize(std::max(count, roster_.has_free_slot() ? 0 : 1));\n", ""),
    one("requests of a step in progress leave", BUILDER, "return is_in_progress(*r); }", "return r == nullptr; }"),
    one(
        "who is displaced comes back at once",
        BUILDER,
        "class_of(r->priority) >= displaced_class_ || !may_go(*r)",
        "!may_go(*r)",
    ),
    one("the tokens of who left are lost", BUILDER, "    budget_left_ += row->num_tokens;\n", ""),
    # Shares.
    one("answers cost nothing", SCHEDULER, "    shares_.charge_answer(r.flow, static_cast<int>(i));\n", ""),
    one("prompts cost nothing", BUILDER, "        shares_.charge_prompt(r.flow, r.num_remaining());\n", ""),
    one(
        "what storage loads for a prompt in part is charged",
        BUILDER,
        "if (r.was_admitted) shares_.refund",
        "if (false) shares_.refund",
    ),
    one("weights do not count", SHARES, "num_tokens * flows_[flow].token_cost", "num_tokens * kUnit"),
    one("an idle flow saves up", SHARES, "std::max(flows_[flow].counter, level_ - credit_)", "flows_[flow].counter"),
    one("an idle flow has earned nothing", SHARES, "level_ - credit_)", "level_)"),
    one("flows begin lower and lower", SHARES, "level_ = std::max(level_, least);", "level_ = least;"),
    one("nobody is past its share", SHARES, "counter(flow) - least >= slack_", "counter(flow) - least > 1e18"),
    one(
        "prompts in part are computed whoever is past its share",
        BUILDER,
        "if (shares_.is_shared()) put_back_past_share(prompts);",
        "",
    ),
    one(
        "a prompt in part that is past its share goes on first",
        BUILDER,
        "if (shares_.is_past(prompt.flow, waiting.flow)) return true;",
        "",
    ),
    one(
        "only an order that interrupts prompts lets a share do so",
        BUILDER,
        "order_.interrupts_prompts() || shares_.is_shared() ||",
        "order_.interrupts_prompts() ||",
    ),
    one(
        "by arrival prompts in part are computed whoever is past its share",
        BUILDER,
        "if (shares_.is_shared()) put_back_past_share(prompts);",
        "if (order_.interrupts_prompts() && shares_.is_shared()) put_back_past_share(prompts);",
    ),
    one(
        "one that waits for room is passed by all",
        BUILDER,
        "        if (refused && shares_.is_past(r->flow, refused->flow)) return;\n",
        "",
    ),
    # The refusal.
    one(
        "a refusal outlives a freed block",
        POOL,
        "::rest(BlockId block) {\n    ++num_room_changes_;",
        "::rest(BlockId block) {",
    ),
    one(
        "a refusal outlives extents that come home",
        POOL_EXTENTS,
        "    num_room_changes_ += blocks_per_extent(lend_link);",
        "",
    ),
    one(
        "an extent that comes home is room for one block",
        POOL_EXTENTS,
        "num_room_changes_ += blocks_per_extent(lend_link);",
        "++num_room_changes_;",
    ),
    one(
        "a staging block is room for one block",
        CACHE_ROOM,
        "can_borrow() ? ceil_div(blocks, spec(g).num_layers) : blocks",
        "blocks",
    ),
    one("a refusal outlives a block that the prompt needs", SCHEDULER, "refusal_.note_commit(r, num_blocks);", ""),
    one(
        "one refusal makes another forgotten",
        REFUSAL,
        "    refused_.insert_or_assign(&r,",
        "    refused_.clear();\n    refused_.insert_or_assign(&r,",
    ),
    one(
        "what is put back is new room", POOL, "    num_room_changes_ = num_room_changes;", "    (void)num_room_changes;"
    ),
    one("room of one group helps another", CACHE_ROOM, "if (group == kNone || group == g) version", "version"),
    one(
        "a refusal outlives a shorter match",
        CACHE_ROOM,
        "int64_t version = group == kNone || groups_[group].spec.window > 0 ? num_window_losses_ : 0;",
        "int64_t version = 0;",
    ),
    one(
        "a refusal outlives a step with less room",
        REFUSAL,
        "(lack.group != kNone || token_budget == budget_then)",
        "true",
    ),
    one(
        "a refused prompt is matched at every step",
        BUILDER,
        "refusal_.still_holds(r, roster_.num_running(), token_budget, !displaceable.empty())",
        "false",
    ),
    one(
        "a refusal outlives the room that was lacking",
        REFUSAL,
        "return growth < (r.back_end",
        "return growth <= (r.back_end",
    ),
    one("fewer that run leave no more room", REFUSAL, " + std::max(0, num_running_then - num_running);", ";"),
    one("who could displace others is refused again", BUILDER, "growth_without(tables_below(r))", "growth_without({})"),
    one(
        "a step looks up all keys of those that wait", BUILDER_H, "num_keys_ < policy_.max_keys() || is_empty()", "true"
    ),
    one(
        "a step without requests looks no further",
        BUILDER_H,
        "num_keys_ < policy_.max_keys() || is_empty()",
        "num_keys_ < policy_.max_keys()",
    ),
    # The plan.
    one(
        "two buffers share their layer blocks",
        PLAN,
        "if (2 * num_streamed > cache_.num_staging_layer_blocks(g)) num_buffers = 1;",
        "",
    ),
    one("a block that is written in part is not loaded", PLAN, "i * size<begin,", "(i + 1) * size<begin,"),
    one(
        "copies are merged that do not lie side by side", PLAN, "last[1] + last[3] * block_bytes == peer_offset", "true"
    ),
    # The ledgers.
    one(
        "an old acceptance counts",
        LENDER,
        "epochs_[extent] == epochs[i] && states_[extent] == kOffered",
        "states_[extent] == kOffered",
    ),
    one("an old return counts", LENDER, "epochs_[extent] != epochs[i] || ", ""),
    one(
        "recalled extents stay out when their borrower dies",
        LENDER,
        "home.insert(home.end(), recalled.begin(), recalled.end());",
        "",
    ),
    one("an old offer is accepted", BORROWER, "epoch < epochs_[extent] || ", ""),
    one("epochs outlive their lender", BORROWER, "std::fill(epochs_.begin(), epochs_.end(), 0);", ""),
    # Loads and their parts.
    one(
        "what could not be read is being read for ever",
        LOADS,
        "self._reading_bytes -= _num_bytes(targets)",
        "self._reading_bytes -= is_loaded * _num_bytes(targets)",
    ),
    # Pins of loads.
    one(
        "a prompt that waits no more keeps its pins", LOADS, "            wait.pins.give_back()\n", "            pass\n"
    ),
    one(
        "a pin that the scheduler has is given back with the search",
        HOST_PINS,
        "            self._chunks[cells] = -1\n            self._host._num_searched -= len(cells)\n",
        "",
    ),
    one("a search that was given up pins", HOST_PINS, "if not self._is_over:", "if True:"),
    one("what was given up before keeps its pins", HOST_PINS, "        self._host._unpin(taken[taken >= 0])\n", ""),
    one("an engine keeps what it has done with", HOST_PINS, "            self._unpin(chunks)\n", "            pass\n"),
    one("an engine keeps what others want", HOST_PINS, "and scheduler.evict_host()", "and True"),
    one(
        "a block in host memory is not verified",
        HOST_PINS,
        "if header is not None:\n                yield",
        "if False:\n                yield",
    ),
    one(
        "a corrupt block stays in host memory",
        HOST_PINS,
        "            drop_corrupt(self._host.guarded, [each.key for each in batch], statuses)\n",
        "",
    ),
    one(
        "what others overwrite is taken for corrupt",
        HOST_PINS,
        "            if self._is_over:\n                self._unverified.clear()\n                return []\n",
        "",
    ),
    one(
        "a computed block replaces one in host memory",
        CACHE,
        " && !is_attended(g, known);",
        " && pool.place(own) < pool.place(known);",
    ),
    one(
        "an engine that ends keeps its pins",
        HOST_PINS,
        "            self._is_closed = True\n            self._medium.give_back()",
        "            pass",
    ),
    one(
        "blocks that need no copy take time",
        LOAD_CHOICE,
        "is_stored > 0 if pinned is None else (is_stored > 0) & (pinned < 0)",
        "is_stored > 0",
    ),
    one(
        "of a prompt that is not worth copying nothing is used",
        LOAD_CHOICE,
        "Stretch(0, attended) if is_enough else None",
        "None",
    ),
    one(
        "a request gives up the block that it comes to next",
        LOADS,
        "return next(iter(wait.state.unread)).index < self",
        "return next(iter(wait.state.unread)).index <= self",
    ),
    one(
        "what was read is given up with what was not",
        LOADS,
        "        for target in part.targets:\n            del wait.state.unread[target]\n",
        "",
    ),
    one(
        "behind a block that is not there more is read",
        LOADER,
        "if is_whole and load.num_begun",
        "if statuses and load.num_begun",
    ),
    one(
        "a load in slow storage stays as large as in fast",
        LOADER,
        "            load.growth = 1  #",
        "            pass  #",
    ),
    one(
        "blocks of a load that is given up stay until its turn comes",
        LOADS,
        "                self._end(not_begun, is_loaded=False)\n",
        "",
    ),
    one("a load that is given up has its turn", LOADER, "self._todo.pop(job, None)", "pass"),
    one("a block lands while a step may use its place", LOADER, "load.handed_out.wait()", "pass"),
    one("more lands than was read", LOADER, "spans[: _num_read(read)]", "spans"),
    one("more is read than there is page-locked memory", LOADER, "num_bytes > self._reach.max_read_bytes", "False"),
    one(
        "a load is told before its bytes are in the pool",
        REACH,
        "for pool, part in zip(self.pools, parts, strict=True)\n        ).wait()",
        "for pool, part in zip(self.pools, parts, strict=True)\n        )",
    ),
    one(
        "a block is let go of before it is copied",
        REACH,
        "self._down.copy(copies).wait()",
        "self._down.copy(copies)",
    ),
    one("who waits behind a call that hangs goes on waiting", LOADS, "or is_hung or", "or"),
    one("a call that has returned hangs for ever", LOADER, "                self.hung_from_s = math.inf\n", ""),
    one("a call that hangs beside free places is not seen", BREAKER, " or any(self._are_hung())", ""),
    # Storage.
    one(
        "a block is not what was put",
        ENVELOPE,
        "if _CHECKSUM.unpack(header[_NAMED.size :]) != (_checksum(named, block),):",
        "if False:",
    ),
    one(
        "a block of other weights is given out",
        ENVELOPE,
        "return Status.OK if owner == fingerprint else Status.MISSING",
        "return Status.OK",
    ),
    one(
        "levels further down get nothing",
        LEVELS,
        "        for level in self.levels:\n            statuses",
        "        for level in self.levels[:1]:\n            statuses",
    ),
    one(
        "a call for more than there was time for is a failure",
        BREAKER,
        "self._is_late = all(status",
        "self._is_late = any(status",
    ),
    one("a medium may leave answers out", BREAKER, "if len(listed) != len(keys):", "if False:"),
    one("reads that fail do not count", BREAKER, "                call.note(statuses)\n", ""),
    one(
        "what is read is not used",
        FILE_MEDIUM,
        "        self._note_uses(key for key, status in zip(keys, statuses, strict=True) if status is Status.OK)\n",
        "",
    ),
    one(
        "a write that fails removes what another process wrote",
        FILE_MEDIUM,
        "for key in named:",
        "for key, _, _ in objects:",
    ),
    one("what is put again is not used", FILE_MEDIUM, "        self._note_uses(known)\n", ""),
    one(
        "reads go on after their deadline",
        FILE_MEDIUM,
        "                if time.monotonic() > deadline_s:\n                    break\n                statuses.append",
        "                statuses.append",
    ),
    one("files that were read stay open", FILE_READS, "        if (fd_ >= 0) close(fd_);\n", ""),
    one("links to files are followed", FILE_READS, "O_RDONLY | O_NOFOLLOW | O_CLOEXEC", "O_RDONLY | O_CLOEXEC"),
    one("a file that cannot be read has no reason", FILE_READS, "num_read < 0 ? -errno : num_read", "num_read"),
    one("what follows a block is not read", FILE_READS, "{more.data(), more.size()}", "{more.data(), 0}"),
    one(
        "files that nobody waits for any more are read",
        FILE_READS,
        "        for (; num_begun_ < files_.size(); ++num_begun_) results_[num_begun_] = -ECANCELED;\n",
        "",
    ),
    one("a file that is too long is an object", FILE_MEDIUM, "disk_bytes(size) - size + 1", "disk_bytes(size) - size"),
    one(
        "a file that is gone is a failure",
        FILE_MEDIUM,
        "Status.MISSING if num_read == -errno.ENOENT else Status.FAILED",
        "Status.FAILED",
    ),
    one(
        "a part of a file is an object",
        FILE_WRITING,
        "if os.pwritev(fd, padded, 0) != file_bytes:",
        "if os.pwritev(fd, padded, 0) == 0:",
    ),
    one(
        "a file is overwritten that somebody reads",
        FILE_WRITING,
        "        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)\n"
        "        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)\n",
        "",
    ),
    one("nothing is overwritten", FILE_WRITING, "if spare_bytes == num_bytes and (fd :=", "if False and (fd :="),
    one("evicted files are kept without end", FILE_WRITING, "self._spare_bytes > self._max_spare_bytes", "False"),
    one("a clock that is set back makes new objects old", FILE_INDEX, ", (latest_ns or 0) + 1)", ", 0)"),
    one("an index that was lost counts nothing afterwards", FILE_INDEX, "        self._db.execute(_ADDED)\n", ""),
    one(
        "parts of host memory are read over the first",
        HOST_MEDIUM,
        "into[begin:end], deadline_s",
        "into[: end - begin], deadline_s",
    ),
    # Host memory.
    one(
        "what is put again in host memory is not used",
        HOST_MEMORY,
        "                touch(id);\n                return HostStatus::kOk;",
        "                return HostStatus::kOk;",
    ),
    one("what is read from host memory is not used", HOST_MEMORY, "        touch(id);\n        tag =", "        tag ="),
    one(
        "what is evicted leaves its chunks behind",
        HOST_MEMORY,
        "        header_.free = chunk;\n        ++header_.num_free;",
        "        header_.free = chunk;",
    ),
    one(
        "what is pinned is evicted",
        HOST_MEMORY,
        "if (is_pinned(id)) {\n            std::atomic_ref(header_.num_wanted)",
        "if (false) {\n            std::atomic_ref(header_.num_wanted)",
    ),
    one(
        "what is pinned is replaced by an object of another length",
        HOST_MEMORY,
        "            if (is_pinned(id)) return HostStatus::kMissing;\n",
        "",
    ),
    one(
        "what is pinned is gone when it is dropped",
        HOST_MEMORY,
        "    if (is_pinned(id)) {\n        leave(id);",
        "    if (false) {\n        leave(id);",
    ),
    one(
        "the first of several pins that is given back is the last",
        HOST_MEMORY,
        "if (--local_[chunk].num_pins > 0) continue;",
        "--local_[chunk].num_pins;",
    ),
    one("pins leave no room for writers", HOST_MEMORY, "{header_.num_chunks} * 3 / 4", "{header_.num_chunks} * 1"),
    one("what two members pin counts twice", HOST_MEMORY, "if (sum <= enough) return", "if (true) return"),
    one("what is pinned is not used", HOST_MEMORY, "        touch(id);\n        pinned[i]", "        pinned[i]"),
    one("nobody is told that pinned objects are wanted", HOST_MEMORY, ".fetch_add(1, std::memory_order_relaxed)", ""),
    one(
        "a dead member keeps its pins",
        HOST_MEMORY,
        "        pins(id).fetch_and(~(uint64_t{1} << member));\n",
        "",
    ),
    one(
        "a dead member keeps what it was writing",
        HOST_MEMORY,
        "        if (record(id).state() == kWriting && record(id).owner == member) evict(id);\n",
        "",
    ),
    one(
        "a release evicts what other members are writing",
        HOST_MEMORY,
        " && record(id).owner == member) evict(id);",
        ") evict(id);",
    ),
    one(
        "what is being written is evicted",
        HOST_MEMORY,
        "} else if (record(id).state() == kWriting) {",
        "} else if (false) {",
    ),
    one(
        "a process takes over from itself",
        HOST_MEMORY,
        "    if (header_.process_of[member_] == this_process()) return;\n",
        "",
    ),
    one(
        "another object in a chunk that was verified counts as verified",
        HOST_MEMORY,
        "local_[chunk].verified_tag == r.load_tag()",
        "local_[chunk].verified_tag != 0",
    ),
    one(
        "what was dropped is found again after a death with the lock",
        HOST_MEMORY,
        "        if (record(id).state() == kReady) enter(id);",
        "        if (record(id).state() != kWriting) enter(id);",
    ),
    one(
        "what is written when nobody gets the lock is lost",
        HOST_MEMORY,
        "        unpublished_.push_back(*std::move(reserved));\n",
        "",
    ),
    one(
        "chunks begin anywhere",
        HOST_MEMORY,
        "layout.num_buckets * sizeof(Id), chunk_bytes)",
        "layout.num_buckets * sizeof(Id), 64)",
    ),
    # Prompts are expected to find in the cache what others were sent before.
    one("a prompt waits for what it brings itself", SENT, "!= request_id:\n", "!= _NOBODY:\n"),
    one("what waits counts as cached", SENT, "_NOBODY) is None:", "_NOBODY) != _NOBODY:"),
    one("a beginning is the last one's", SENT, "= self._first.pop(piece, request_id)", "= request_id"),
    one("beginnings are forgotten before ends", SENT, "for piece in reversed(pieces):", "for piece in pieces:"),
    one("nothing is forgotten", SENT, "> self.max_tokens:", "> 1e18:"),
    one("nobody hears of a prompt that begins", SENT, "freed += self._waiting_for.pop(piece, ())", "pass"),
    one(
        "a prompt given up leaves its beginnings",
        SENT,
        "                del self._first[piece]\n",
        "                pass\n",
    ),
    one("a prompt given up waits for others", SENT, "            alike.remove(request_id)\n", ""),
    one(
        "what is cached is counted from where a prompt waited",
        SENT,
        "Found(prompt.num_cached_pieces * _PIECE_TOKENS, found",
        "Found(found.num_cached, found",
    ),
    # Requests have waited since they came to the gateway.
    one(
        "a request has waited since its engine read it",
        ENGINE,
        "arrival_s=request.arrived_s,",
        "arrival_s=time.monotonic(),",
    ),
    # Rules about single tokens.
    one("rules stand still behind guesses", RULES, "or place is None else place.after(input_id)", "else place"),
    one("an answer stays at its beginning", ENGINE, "self._rules.advance(", "print("),
    one("rules go by the step before the last", ENGINE, "or self._rules.are_in(plan)", "or False"),
    one("thoughts are counted behind the reasoning", RULES, "- self.reasoning.is_inside", "- 1"),
    one("reasoning has one token more", RULES, "self.num_left <= 0", "self.num_left < 0"),
    one("words are looked for in the latest token alone", RULES, "(len(self.recent) + 1)", "(2)"),
    one("a rule takes a grammar's place", RULES, "masks.words_of(row, self._num_words)", "self._mask_of(None)"),
    one("a rule outlives its request", ENGINE, "        self._rules.release(request_id)\n", ""),
]

"""The comparison of two sides, `etfarm.comparison/1`: changes of latency, size, memory, accuracy and operators. Pure.

Takes REPORTs of etfarm.report/1 and returns one document in strict JSON, with every key and null for absent values:

    {schema, base: SIDE, candidate: SIDE, pairs[PAIR], unpaired[{side: BASE|CANDIDATE, report: REPORT_NAME}], notes[],
     gate: GATE|null, error: ERROR|null}
    SIDE         {job: JOB|null, file, choice, reports}   `choice` is the text after `#`, `reports` the number compared
    REPORT_NAME  {id, cell, attempt, model, recipe, method, threads, device{id,name,arch,soc}, state, error: REASON|null,
                  verdict{status,codes[]}, cores, inputs, inputs_from_job, warmup, timed_ns, runs}   `inputs` is their digest
    PAIR         {base: REPORT_NAME, candidate: REPORT_NAME, differs[], latency, operators, size, memory, accuracy[], delegation,
                  changes[{what,base,candidate}], generation}    `changes` as etfarm.wire.changes has them
                  `differs` lists those of model, recipe, method, threads and device that differ
    NUMBER       {base, candidate, change, ratio}          change = candidate - base, ratio = candidate / base
    latency      {ratio, ratio_ci95[2]|null, method: paired|separate, outcome: faster|slower|no_difference|too_few|inconclusive,
                  rounds, process_pairs, p50_ns: NUMBER, p90_ns, p99_ns, load_ns, load_method_ns, first_run_ns, same_program,
                  base_spread: RUN_SPREAD|null, candidate_spread: RUN_SPREAD|null}
                  paired: both took turns in one attempt, and rounds were compared; separate: each was measured alone, and
                  the interval covers the variation between runs as far as it is known (etfarm.wire.comparison.uncertainty).
                  inconclusive: separate, and the spread between runs was not observed for both sides,
                                or is large and the difference not beyond its 99 % interval
    RUN_SPREAD   {source: REPEATS|HISTORY|PRIOR, runs, relative_stddev, p50_ci95_ns[2]|null}    as in REPORT
    operators    {by: OPERATOR|MODULE, rows[{kind: OPERATOR|DELEGATE|REST|UNATTRIBUTED, module, op_types[], source,
                  base: TIME|null, candidate: TIME|null, change_ns, change_share, change_ci95_ns[2]|null, outcome}],
                  matched_by: INDEX|GRAPH|NAME}, the largest changes first (etfarm.wire.comparison.matching)
    TIME         {name, indexes[], time_ns, share, time_ci95_ns[2]|null}   of the traced pass; a row with only one side was
                  added or removed
    size         {total_bytes, pte_bytes, program_bytes, constant_bytes, delegate_bytes, data_bytes}: each NUMBER|null
    memory       {peak_rss_bytes, planned_bytes}: each NUMBER|null
    accuracy     [{output, base: ERRORS|null, candidate: ERRORS|null, change_db}]   `change_db` is null if the two have no
                  common reference, or are of other samples
    ERRORS       {reference, equal, sqnr_db, max_abs_error, top1_agreement, nan_count, samples, samples_digest}
    delegation   {METHOD: {subgraphs, delegated_nodes, non_delegated_nodes: NUMBER,
                  operators[{op, base{delegated,non_delegated}|null, candidate|null}]}}, of operators whose counts differ;
                  nodes that compute nothing, such as getitem, are not counted
    generation   {points[{prompt_tokens, depth, base_verdict, candidate_verdict, ttft: RATE|null, prefill, decode,
                  parts[{method, prefill_ns: NUMBER|null, decode_ns: NUMBER|null}]}], same_program, accuracy: LOGITS|null}|null,
                  of the prompt lengths and depths that both have
    LOGITS       {base: LOGIT_ERRORS|null, candidate: LOGIT_ERRORS|null, sqnr_change_db, top1_change, top1_tolerance,
                  top1_dropped, perplexity: NUMBER|null}
                  `top1_dropped`: by more than `top1_tolerance`, a fraction (etfarm.wire.comparison.logits)
    LOGIT_ERRORS {reference, tokens, sqnr_db, top1_agreement, kl_divergence, max_abs_error, perplexity, perplexity_ratio,
                  generated_tokens, first_difference}
    RATE         {base, candidate, ratio, ratio_ci95[2]|null, outcome, spread_observed}    `outcome` as that of latency
    GATE         {limits[{metric, limit, unit}], strict, accept_invalid, passed, outcome: passed|failed|inconclusive,
                  reasons[FINDING], notes[FINDING]}        `passed` is whether the outcome is
    FINDING      {pair, metric, code, message}             `pair` is an index of pairs; null for the whole document
"""

from etfarm.wire.comparison.accuracy_gate import EXACT_DB
from etfarm.wire.comparison.document import SCHEMA, compare, failed
from etfarm.wire.comparison.gate import UNDECIDED, Gate, Limit, judge
from etfarm.wire.comparison.message import from_message, to_message
from etfarm.wire.comparison.sides import Side, label, split_choice, traits

__all__ = [
    "EXACT_DB",
    "SCHEMA",
    "UNDECIDED",
    "Gate",
    "Limit",
    "Side",
    "compare",
    "failed",
    "from_message",
    "judge",
    "label",
    "split_choice",
    "to_message",
    "traits",
]

// What each reason means, for people, and its tone: run, need (something is short), turn (others come first), out (preempted or lost), idle.

const REASONS = {
  ARRIVED: ["idle", "arrived during a step"],
  NO_WORKER: ["out", "no worker can run steps: {why}"],
  NEED_BLOCKS: ["need", "needs {need} blocks, {free} were free"],
  TOKEN_BUDGET: ["need", "needs {need} tokens, {left} of the step's {budget} were left"],
  MAX_SEQS: ["need", "{running} sequences run, {limit} may"],
  LORA_SLOTS: ["need", "adapter {adapter} is one more than the {limit} that may run"],
  DELAY: ["turn", "prompts wait for company"],
  BATCH_UNDER_WAY: ["turn", "no request joins a static batch"],
  STEP_PREEMPTS: ["turn", "the step preempted {preempted} others"],
  DECODE_FIRST: ["turn", "the step is one of decodes"],
  STEP_GRANTED: ["turn", "the worker had begun the step by a grant"],
  SWAPPED_FIRST: ["turn", "requests on the host come back first"],
  OUTRANKED: ["turn", "a more important one comes first"],
  PREFILL_FIRST: ["turn", "the step is one of prompts"],
  RESULT_PENDING: ["turn", "a step of it is in flight"],
  MAKES_WAY: ["turn", "all make way for one that was stuck"],
  RESERVED: ["need", "running requests are forecast to need the blocks: {need} of {capacity}"],
  THRESHOLD: ["need", "needs {need} blocks, {free} were left for prompts"],
  SLOT_TYPE: ["turn", "its lane takes other work now"],
  LANE_BUSY: ["need", "every lane that could take it is busy"],
  PREFIX_AFFINITY: ["turn", "{known} tokens of it are cached at the worker that it waits for"],
  GROUP_BUSY: ["turn", "worker {worker} has less to do and starts it"],
  GROUP_TOO_SMALL: ["need", "the cache of worker {worker} is too small for its longest output"],
  WORKER_DRAINS: ["turn", "every worker is drained"],
  TENANT_SHARE: ["turn", "another tenant's request comes first"],
  MADE_ROOM: ["turn", "others were preempted for it; it starts next"],
  PREEMPTED: ["out", "preempted ({mode})"],
  MOVED: ["run", "goes on at worker {worker}, which has its KV"],
  WORKER_LOST: ["out", "its worker was lost; it is computed again"],
  BEHIND: ["idle", "behind {head}: {head_reason}"],
  RUNNING: ["run", "runs"],
  ENDED: ["idle", "is over"],
  BEFORE: ["idle", "since before the recording begins"],
};

/** run, need, turn, out or idle. */
export const tone = (reason) => REASONS[reason]?.[0] ?? "turn";

/** A sentence with the numbers that decided; where one is missing the numbers stand alone. */
export function because(reason, numbers, show) {
  const text = REASONS[reason]?.[1];
  let isWhole = text !== undefined;
  const filled = (text ?? "").replace(/\{(\w+)\}/g, (_, name) => {
    isWhole &&= name in numbers;
    return name in numbers ? show(numbers[name]) : "";
  });
  return isWhole ? filled : listed(numbers, show);
}

/** "need 12 · free 9". */
export const listed = (numbers, show) =>
  Object.entries(numbers)
    .map(([name, number]) => `${name.replaceAll("_", " ")} ${show(number)}`)
    .join(" · ");

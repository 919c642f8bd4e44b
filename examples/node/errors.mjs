// What Quire says when a call fails: google.rpc.Status in the trailers, with ErrorInfo, and BadRequest and RetryInfo where they apply.

import grpc from "@grpc/grpc-js";

import { decodeDetail } from "./protos.mjs";

// `code` is gRPC's; `reason` a stable word ("INVALID_FIELD", "PROMPT_TOO_LONG"); `violations` the fields at fault; `retryAfterMs`
// when to come again. Without `fromQuire` there was no answer: the connection broke, or the deadline passed on this side.
export class QuireError extends Error {
  constructor(error) {
    super(error.details || error.message, { cause: error });
    this.name = "QuireError";
    this.code = error.code;
    const said = statusDetails(error);
    this.fromQuire = said !== undefined;
    this.reason = said?.ErrorInfo?.reason ?? grpc.status[error.code];
    this.metadata = said?.ErrorInfo?.metadata ?? {};
    this.violations = said?.BadRequest?.field_violations ?? [];
    this.retryAfterMs = milliseconds(said?.RetryInfo?.retry_delay);
  }
}

// Details by the last word of their type; undefined where there is no status from Quire.
function statusDetails(error) {
  const [bytes] = error.metadata?.get("grpc-status-details-bin") ?? [];
  if (bytes === undefined) return undefined;
  const status = decodeDetail("google.rpc.Status", bytes);
  const named = status.details.map(({ type_url, value }) => {
    const type = type_url.split("/").pop();
    return [type.split(".").pop(), decodeDetail(type, value)];
  });
  return Object.fromEntries(named);
}

function milliseconds(duration) {
  return duration ? Number(duration.seconds) * 1000 + duration.nanos / 1e6 : undefined;
}

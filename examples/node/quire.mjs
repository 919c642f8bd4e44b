// A client of Quire: chats and completions, whole or streamed, with deadline, cancel, typed errors, and streams that go on at
// another gateway when theirs is lost.

import grpc from "@grpc/grpc-js";

import { QuireError } from "./errors.mjs";
import { InferenceService } from "./protos.mjs";

// gRPC tries again by itself where nothing was answered: safe, as nothing was generated. What Quire refuses it does not repeat.
const SERVICE_CONFIG = {
  loadBalancingConfig: [],
  methodConfig: [
    {
      name: [{ service: "quire.inference.v1.InferenceService" }],
      retryPolicy: {
        maxAttempts: 3,
        initialBackoff: "0.1s",
        maxBackoff: "1s",
        backoffMultiplier: 3,
        retryableStatusCodes: ["UNAVAILABLE"],
      },
    },
  ],
};

// Where a stream can go on from at another gateway: theirs is gone, which this side sees in several ways.
const LOST = new Set([grpc.status.UNAVAILABLE, grpc.status.INTERNAL, grpc.status.UNKNOWN, grpc.status.CANCELLED]);

export class Quire {
  // `addresses`: one gateway, "HOST:PORT", or several that are tried in this order. `rootCertificates` (PEM) turns TLS on;
  // `certificate` and `privateKey` (PEM) are one's own, where the gateway wants one.
  constructor(addresses, { apiKey, rootCertificates, certificate, privateKey } = {}) {
    this.apiKey = apiKey;
    const credentials = rootCertificates
      ? grpc.credentials.createSsl(rootCertificates, privateKey, certificate)
      : grpc.credentials.createInsecure();
    const options = { "grpc.service_config": JSON.stringify(SERVICE_CONFIG) };
    this.stubs = [addresses].flat().map((address) => new InferenceService(address, credentials, options));
  }

  close() {
    for (const stub of this.stubs) stub.close();
  }

  // A method that answers once: call("Chat", {messages: [...]}, {deadlineMs: 2000}).
  call(method, request, options = {}) {
    return new Promise((resolve, reject) => {
      const done = (error, response) => {
        forget();
        if (error) reject(new QuireError(error));
        else resolve(response);
      };
      const call = this.stubs[0][method](request, this.#metadata(options), callOptions(options), done);
      const forget = cancelOn(options.signal, call);
    });
  }

  // The events of a ChatStream, GenerateStream or Resume. Leaving the loop cancels the request; so does `signal`.
  async *stream(method, request, options = {}) {
    yield* this.#read(this.stubs[0], method, request, options);
  }

  // The events of a chat that survives its gateway: the next one is asked to read on where this one stopped, or to begin where
  // nothing had come yet. Every token comes once.
  async *resumableChat(request, options = {}) {
    const seen = new Positions();
    let [method, message] = ["ChatStream", { ...request, resumable: true }];
    for (const [i, stub] of this.stubs.entries()) {
      try {
        for await (const event of this.#read(stub, method, message, options)) {
          seen.note(event);
          yield event;
        }
        return;
      } catch (error) {
        if (i + 1 === this.stubs.length || !isLost(error)) throw error;
        if (seen.requestId) [method, message] = ["Resume", seen.resumeRequest()];
      }
    }
  }

  async *#read(stub, method, request, options) {
    const call = stub[method](request, this.#metadata(options), callOptions(options));
    const forget = cancelOn(options.signal, call);
    try {
      yield* call;
    } catch (error) {
      throw new QuireError(error);
    } finally {
      // Without this a loop that is left early would let the model write on: grpc-js does not cancel by itself.
      call.cancel();
      forget();
    }
  }

  #metadata({ requestId, idempotencyKey }) {
    const metadata = new grpc.Metadata();
    if (this.apiKey) metadata.set("authorization", `Bearer ${this.apiKey}`);
    if (requestId) metadata.set("x-request-id", requestId);
    if (idempotencyKey) metadata.set("idempotency-key", idempotencyKey);
    return metadata;
  }
}

// Cancels `call` when `signal` (an AbortSignal, or none) says so; returns what ends that.
function cancelOn(signal, call) {
  const cancel = () => call.cancel();
  if (signal?.aborted) cancel();
  signal?.addEventListener("abort", cancel);
  return () => signal?.removeEventListener("abort", cancel);
}

function callOptions({ deadlineMs }) {
  return deadlineMs === undefined ? {} : { deadline: Date.now() + deadlineMs };
}

function isLost(error) {
  return error instanceof QuireError && !error.fromQuire && LOST.has(error.code);
}

// How much of each choice of a stream has been read.
class Positions {
  requestId = "";
  #offsets = new Map();

  note(event) {
    if (event.started) this.requestId = event.started.request_id;
    const delta = event.delta ?? event.reasoning_delta ?? event.tool_call_delta;
    if (delta?.token_ids.length) this.#offsets.set(delta.choice, delta.token_offset + delta.token_ids.length);
  }

  resumeRequest() {
    const positions = [...this.#offsets].map(([choice, token_offset]) => ({ choice, token_offset }));
    return { request_id: this.requestId, positions };
  }
}

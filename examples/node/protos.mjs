// The protos as JavaScript objects: no code is generated. QUIRE_PROTO_ROOT names the folder that has `protos/` in it, where that is
// not this repository.

import path from "node:path";
import { fileURLToPath } from "node:url";

import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const here = path.dirname(fileURLToPath(import.meta.url));
const root = process.env.QUIRE_PROTO_ROOT ?? path.join(here, "..", "..");

// Names as in the .proto, enums by name, 64-bit numbers as text: a seed does not fit a JavaScript number.
const AS_WRITTEN = { keepCase: true, enums: String, longs: String, defaults: true, arrays: true, oneofs: true };

const quire = protoLoader.loadSync("protos/inference/v1/inference.proto", { ...AS_WRITTEN, includeDirs: [root] });
const details = protoLoader.loadSync("google_rpc.proto", { ...AS_WRITTEN, includeDirs: [here] });

export const { InferenceService } = grpc.loadPackageDefinition(quire).quire.inference.v1;

// The message of type `name` ("google.rpc.Status") in `bytes`; undefined for types that google_rpc.proto does not have.
export function decodeDetail(name, bytes) {
  return details[name]?.deserialize(bytes);
}

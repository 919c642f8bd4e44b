"""A client that knows only an address: services, methods and messages come from the server's reflection; no generated code.

.venv/bin/python examples/reflection.py [HOST:PORT] [METHOD] [JSON]      (METHOD and JSON: GenerateStream '{"text": "import "}')

Elsewhere: pip install grpcio grpcio-reflection.
"""

import sys

import grpc
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

SERVICE = "quire.inference.v1.InferenceService"
EXAMPLE = dict.fromkeys(("Generate", "GenerateStream"), '{"text": "import ", "stop": {"maxTokens": 8}}')


def describe(database: ProtoReflectionDescriptorDatabase, pool: DescriptorPool) -> None:
    """Prints what the server offers."""
    for name in sorted(database.get_services()):
        print(name)
        for method in pool.FindServiceByName(name).methods:
            answer = f"stream {method.output_type.name}" if method.server_streaming else method.output_type.name
            print(f"  {method.name}({method.input_type.name}) -> {answer}")


def call(channel: grpc.Channel, method: MethodDescriptor, request_json: str) -> None:
    """Calls `method` with a request in protobuf's JSON, and prints the answer, or each event of it, as JSON."""
    request = json_format.Parse(request_json, message_factory.GetMessageClass(method.input_type)())
    open_call = channel.unary_stream if method.server_streaming else channel.unary_unary
    send = open_call(
        f"/{method.containing_service.full_name}/{method.name}",
        request_serializer=type(request).SerializeToString,
        response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
    )
    answer = send(request, timeout=60)
    for message in answer if method.server_streaming else [answer]:
        print(json_format.MessageToJson(message, indent=None))


def main(target: str = "127.0.0.1:50051", name: str = "GenerateStream", request_json: str = "") -> None:
    """Describes the server, then makes one call."""
    with grpc.insecure_channel(target) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = DescriptorPool(database)
        describe(database, pool)
        methods = pool.FindServiceByName(SERVICE).methods_by_name
        if name not in methods:
            sys.exit(f"there is no method {name}; there are {', '.join(methods)}")
        try:
            call(channel, methods[name], request_json or EXAMPLE.get(name, "{}"))
        except json_format.ParseError as error:
            sys.exit(f"the request does not fit: {error}")
        except grpc.RpcError as error:
            reason = dict(error.trailing_metadata() or ()).get("x-error-reason", "CONNECTION")
            sys.exit(f"{error.code().name} {reason}: {error.details()}")


if __name__ == "__main__":
    main(*sys.argv[1:])

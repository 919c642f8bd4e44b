#!/usr/bin/env bash
# Compiles the example with Debian's packages: build.sh FOLDER, then: java -cp "$(cat FOLDER/classpath)" QuireChat HOST:PORT PROMPT
#   apt install default-jdk-headless protobuf-compiler protobuf-compiler-grpc-java-plugin libgrpc-java \
#     libprotobuf-java libnetty-java libgeronimo-annotation-1.3-spec-java
# A Maven or Gradle project has protobuf's plugin do the first step, with this repository's root as proto path.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../.." && pwd)"
folder="${1:?usage: build.sh FOLDER}"
jars="$(printf '%s:' /usr/share/java/{grpc-*,protobuf,guava,failureaccess,perfmark-*,netty-*,opencensus-api,gson,geronimo-annotation-1.3-spec}.jar)"

mkdir -p "$folder/generated" "$folder/classes"
protoc -I "$root" --java_out="$folder/generated" --grpc-java_out="$folder/generated" \
  --plugin=protoc-gen-grpc-java="$(command -v grpc_java_plugin)" \
  "$root/protos/common/v1/common.proto" "$root/protos/inference/v1/inference.proto"
# In quotes, as a path may have spaces in it.
find "$folder/generated" "$here/src" -name '*.java' | sed 's/.*/"&"/' > "$folder/sources"
javac -nowarn -proc:none -d "$folder/classes" -cp "$jars" "@$folder/sources"
printf '%s:%s\n' "$folder/classes" "$jars" > "$folder/classpath"

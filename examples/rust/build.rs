//! Generates the messages of `quire.inference.v1` from the protos of this repository.

fn main() -> std::io::Result<()> {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let file = |name: &str| format!("{root}/protos/{name}.proto");
    println!("cargo:rerun-if-changed={root}/protos");
    prost_build::Config::new()
        .include_file("quire_protos.rs")
        .compile_protos(&[file("common/v1/common"), file("inference/v1/inference")], &[root])
}

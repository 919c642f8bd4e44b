//! A streaming chat with Quire: deadline, resuming after a lost gateway, typed errors.
//!
//!     quire-chat HOST:PORT[,HOST:PORT...] PROMPT [MAX_TOKENS]
//!
//! Several addresses: where one gateway is lost, the stream is read on at the next, from the tokens that are here already.

mod grpc;
#[allow(dead_code)]
mod quire_protos {
    include!(concat!(env!("OUT_DIR"), "/quire_protos.rs"));
}

use std::{collections::BTreeMap, env, io::Write, process::ExitCode, time::Duration, time::SystemTime};

use grpc::{Channel, Failure};
use quire_protos::quire::inference::v1::{
    generate_event::Event, ChatRequest, ChoicePosition, GenerateEvent, Message, ResumeRequest, StopConditions, Usage,
};

const TIMEOUT: Duration = Duration::from_secs(60);

/// What has been read of one request; enough to read it on elsewhere.
struct Reader {
    request_id: String,
    num_tokens: BTreeMap<u32, u32>,
    is_started: bool,
}

impl Reader {
    fn resume(&self) -> ResumeRequest {
        let position = |(&choice, &token_offset): (&u32, &u32)| ChoicePosition { choice, token_offset };
        ResumeRequest { request_id: self.request_id.clone(), positions: self.num_tokens.iter().map(position).collect() }
    }

    async fn read(&mut self, address: &str, request: &ChatRequest) -> Result<(), Failure> {
        let channel = Channel::connect(address).await?;
        let mut events = match self.is_started {
            true => channel.call("Resume", &self.resume(), TIMEOUT, &self.request_id).await?,
            // Sent again, it attaches to the request that runs already.
            false => channel.call("ChatStream", request, TIMEOUT, &self.request_id).await?,
        };
        while let Some(GenerateEvent { event: Some(event), .. }) = events.next().await? {
            self.take(event);
        }
        Ok(())
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Started(_) => self.is_started = true,
            Event::Delta(d) => self.show(&d.text, d.choice, d.token_offset, d.token_ids.len()),
            Event::ReasoningDelta(d) => self.show(&d.text, d.choice, d.token_offset, d.token_ids.len()),
            Event::ToolCallDelta(d) => self.show(&(d.name + &d.arguments), d.choice, d.token_offset, d.token_ids.len()),
            Event::Usage(usage) => finish(&usage),
            Event::Finished(_) | Event::PromptLogprobs(_) => {}
        }
    }

    fn show(&mut self, text: &str, choice: u32, offset: u32, num_tokens: usize) {
        print!("{text}");
        std::io::stdout().flush().ok();
        self.num_tokens.insert(choice, offset + num_tokens as u32);
    }
}

fn finish(usage: &Usage) {
    let queue_ms = usage.timing.as_ref().map_or(0.0, |timing| timing.queue_ms);
    let (prompt, output) = (usage.prompt_tokens, usage.completion_tokens);
    println!("\n[{prompt} prompt + {output} output tokens, waited {queue_ms:.1} ms]");
}

fn explain(failure: &Failure) {
    eprintln!("error {} {}: {}", failure.code, failure.reason, failure.message);
    if let Some(retry_ms) = failure.retry_after_ms {
        eprintln!("try again in {retry_ms} ms");
    }
}

fn new_request(prompt: &str, max_tokens: u32) -> ChatRequest {
    ChatRequest {
        messages: vec![Message { role: "user".into(), content: prompt.into(), ..Default::default() }],
        stop: Some(StopConditions { max_tokens: Some(max_tokens), ..Default::default() }),
        resumable: true,
        ..Default::default()
    }
}

fn new_request_id() -> String {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970");
    format!("rust-{}-{:x}", std::process::id(), now.as_nanos())
}

/// Tries each gateway twice.
async fn chat(addresses: &[&str], request: &ChatRequest) -> Result<(), Failure> {
    let mut reader = Reader { request_id: new_request_id(), num_tokens: BTreeMap::new(), is_started: false };
    let mut attempts = addresses.iter().chain(addresses).peekable();
    while let Some(address) = attempts.next() {
        match reader.read(address, request).await {
            Err(failure) if failure.is_gateway_lost() && attempts.peek().is_some() => continue,
            result => return result,
        }
    }
    unreachable!("the last attempt returns")
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [addresses, prompt, rest @ ..] = arguments.as_slice() else {
        eprintln!("usage: quire-chat HOST:PORT[,HOST:PORT...] PROMPT [MAX_TOKENS]");
        return ExitCode::from(2);
    };
    let max_tokens = rest.first().and_then(|text| text.parse().ok()).unwrap_or(100);
    let addresses: Vec<&str> = addresses.split(',').collect();
    let request = new_request(prompt, max_tokens);
    match tokio::time::timeout(TIMEOUT, chat(&addresses, &request)).await.unwrap_or_else(|_| Err(Failure::late())) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            explain(&failure);
            ExitCode::FAILURE
        }
    }
}

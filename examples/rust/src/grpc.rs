//! A streaming gRPC call over one HTTP/2 connection: as much of gRPC as a client of Quire needs, on the crate h2.

use std::{fmt, time::Duration};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use h2::{client::SendRequest, RecvStream};
use http::{HeaderMap, Request};
use prost::Message;
use tokio::net::TcpStream;

const SERVICE: &str = "quire.inference.v1.InferenceService";
const DEADLINE_EXCEEDED: u32 = 4;
const UNAVAILABLE: u32 = 14;

/// How a call failed: gRPC's status, and Quire's stable reason and retry time, which come as trailers of text.
#[derive(Debug)]
pub struct Failure {
    pub code: u32,
    pub message: String,
    pub reason: String,
    pub retry_after_ms: Option<u64>,
}

impl Failure {
    /// The connection broke or was never there: nobody said so, so another gateway may help.
    fn lost(error: impl fmt::Display) -> Self {
        Failure { code: UNAVAILABLE, message: error.to_string(), reason: "CONNECTION".into(), retry_after_ms: None }
    }

    /// The gateway has not even said in time that the deadline passed.
    pub fn late() -> Self {
        Failure { code: DEADLINE_EXCEEDED, ..Failure::lost("nothing more came before the deadline") }
    }

    pub fn is_gateway_lost(&self) -> bool {
        self.code == UNAVAILABLE
    }

    fn from_trailers(trailers: &HeaderMap) -> Option<Self> {
        let text = |name: &str| trailers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_string();
        match text("grpc-status").parse() {
            Ok(0) => None,
            code => Some(Failure {
                code: code.unwrap_or(2),
                message: decoded(&text("grpc-message")),
                reason: text("x-error-reason"),
                retry_after_ms: text("x-retry-after-ms").parse().ok(),
            }),
        }
    }
}

/// gRPC's messages are UTF-8 in which whatever is not plain ASCII, and `%`, is percent-encoded.
fn decoded(message: &str) -> String {
    let mut bytes = Vec::with_capacity(message.len());
    let mut rest = message.as_bytes();
    while let Some((&first, behind)) = rest.split_first() {
        let digits = behind.get(..2).filter(|_| first == b'%').and_then(|pair| std::str::from_utf8(pair).ok());
        let byte = digits.and_then(|pair| u8::from_str_radix(pair, 16).ok());
        bytes.push(byte.unwrap_or(first));
        rest = if byte.is_some() { &behind[2..] } else { behind };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// One connection to a gateway, in plain text.
pub struct Channel {
    address: String,
    sender: SendRequest<Bytes>,
}

impl Channel {
    pub async fn connect(address: &str) -> Result<Self, Failure> {
        let socket = TcpStream::connect(address).await.map_err(Failure::lost)?;
        let (sender, connection) = h2::client::handshake(socket).await.map_err(Failure::lost)?;
        tokio::spawn(connection);
        Ok(Channel { address: address.to_string(), sender })
    }

    /// Begins a call that answers with a stream. `key`: idempotency key, so that a repeated call generates nothing twice.
    pub async fn call<M: Message>(&self, method: &str, message: &M, timeout: Duration, key: &str) -> Result<Stream, Failure> {
        let request = Request::post(format!("http://{}/{SERVICE}/{method}", self.address))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .header("grpc-timeout", format!("{}m", timeout.as_millis()))
            .header("idempotency-key", key)
            .body(())
            .expect("these headers are valid");
        let mut sender = self.sender.clone().ready().await.map_err(Failure::lost)?;
        let (response, mut body) = sender.send_request(request, false).map_err(Failure::lost)?;
        body.send_data(framed(message), true).map_err(Failure::lost)?;
        let response = response.await.map_err(Failure::lost)?;
        match Failure::from_trailers(response.headers()).filter(|_| response.headers().contains_key("grpc-status")) {
            Some(failure) => Err(failure),
            None => Ok(Stream { body: response.into_body(), received: BytesMut::new() }),
        }
    }
}

/// gRPC's frame: a byte that says "not compressed", the length, the message.
fn framed<M: Message>(message: &M) -> Bytes {
    let mut frame = BytesMut::with_capacity(5 + message.encoded_len());
    frame.put_u8(0);
    frame.put_u32(message.encoded_len() as u32);
    message.encode(&mut frame).expect("there is room");
    frame.freeze()
}

/// Messages of a running call; dropping it cancels the call.
pub struct Stream {
    body: RecvStream,
    received: BytesMut,
}

impl Stream {
    /// The next message; None after the last of a call that went well.
    pub async fn next<M: Message + Default>(&mut self) -> Result<Option<M>, Failure> {
        loop {
            if let Some(frame) = self.take_frame() {
                return M::decode(frame).map(Some).map_err(Failure::lost);
            }
            match self.body.data().await {
                Some(data) => {
                    let data = data.map_err(Failure::lost)?;
                    self.body.flow_control().release_capacity(data.len()).map_err(Failure::lost)?;
                    self.received.extend_from_slice(&data);
                }
                None => return self.end().await,
            }
        }
    }

    fn take_frame(&mut self) -> Option<Bytes> {
        let length = (&*self.received).get(1..5).map(|mut bytes| bytes.get_u32() as usize)?;
        if self.received.len() < 5 + length {
            return None;
        }
        self.received.advance(5);
        Some(self.received.split_to(length).freeze())
    }

    async fn end<M>(&mut self) -> Result<Option<M>, Failure> {
        let trailers = self.body.trailers().await.map_err(Failure::lost)?;
        let trailers = trailers.ok_or_else(|| Failure::lost("the stream ended without a status"))?;
        Failure::from_trailers(&trailers).map_or(Ok(None), Err)
    }
}

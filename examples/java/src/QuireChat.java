import dev.quire.inference.v1.ChatRequest;
import dev.quire.inference.v1.ChoicePosition;
import dev.quire.inference.v1.GenerateEvent;
import dev.quire.inference.v1.InferenceServiceGrpc;
import dev.quire.inference.v1.Message;
import dev.quire.inference.v1.ResumeRequest;
import dev.quire.inference.v1.StopConditions;
import dev.quire.inference.v1.Usage;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.stub.MetadataUtils;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.Iterator;
import java.util.Map;
import java.util.TreeMap;
import java.util.UUID;
import java.util.concurrent.TimeUnit;

/**
 * A streaming chat with Quire: deadline, resuming after a lost gateway, typed errors.
 *
 * <pre>QuireChat HOST:PORT[,HOST:PORT...] PROMPT [MAX_TOKENS]</pre>
 *
 * Several addresses: where one gateway is lost, the stream is read on at the next, from the tokens that are here already.
 */
public final class QuireChat {
  private static final Metadata.Key<String> IDEMPOTENCY_KEY = key("idempotency-key");
  private static final Metadata.Key<String> ERROR_REASON = key("x-error-reason");
  private static final Metadata.Key<String> RETRY_AFTER_MS = key("x-retry-after-ms");
  private static final long TIMEOUT_S = 60;

  private final String requestId = UUID.randomUUID().toString();
  private final Map<Integer, Integer> numTokens = new TreeMap<>();
  private boolean isStarted;
  private boolean isComplete;

  public static void main(String[] arguments) throws InterruptedException {
    // Text is any script's; by itself Java prints "?" where the locale is C, as in most containers.
    System.setOut(new PrintStream(new FileOutputStream(FileDescriptor.out), true, StandardCharsets.UTF_8));
    System.setErr(new PrintStream(new FileOutputStream(FileDescriptor.err), true, StandardCharsets.UTF_8));
    if (arguments.length < 2) {
      System.err.println("usage: QuireChat HOST:PORT[,HOST:PORT...] PROMPT [MAX_TOKENS]");
      System.exit(2);
    }
    int maxTokens = arguments.length > 2 ? Integer.parseInt(arguments[2]) : 100;
    System.exit(new QuireChat().chat(arguments[0].split(","), newRequest(arguments[1], maxTokens)) ? 0 : 1);
  }

  private static ChatRequest newRequest(String prompt, int maxTokens) {
    return ChatRequest.newBuilder()
        .addMessages(Message.newBuilder().setRole("user").setContent(prompt))
        .setStop(StopConditions.newBuilder().setMaxTokens(maxTokens))
        .setResumable(true)
        .build();
  }

  /** Tries each gateway twice. True when the whole answer was read. */
  private boolean chat(String[] addresses, ChatRequest request) throws InterruptedException {
    for (int attempt = 0; attempt < 2 * addresses.length; attempt++) {
      ManagedChannel channel = ManagedChannelBuilder.forTarget(addresses[attempt % addresses.length]).usePlaintext().build();
      try {
        read(channel, request);
        return isComplete;
      } catch (StatusRuntimeException error) {
        boolean isGatewayLost = error.getStatus().getCode() == Status.Code.UNAVAILABLE;
        if (!isGatewayLost || attempt + 1 == 2 * addresses.length) {
          explain(error);
          return false;
        }
      } finally {
        channel.shutdownNow().awaitTermination(1, TimeUnit.SECONDS);
      }
    }
    return false;
  }

  private void read(ManagedChannel channel, ChatRequest request) {
    Metadata headers = new Metadata();
    headers.put(IDEMPOTENCY_KEY, requestId); // sent again, it attaches to the request that runs already
    InferenceServiceGrpc.InferenceServiceBlockingStub stub =
        InferenceServiceGrpc.newBlockingStub(channel)
            .withInterceptors(MetadataUtils.newAttachHeadersInterceptor(headers))
            .withDeadlineAfter(TIMEOUT_S, TimeUnit.SECONDS);
    Iterator<GenerateEvent> events = isStarted ? stub.resume(whereWeAre()) : stub.chatStream(request);
    while (events.hasNext()) {
      take(events.next());
    }
  }

  private ResumeRequest whereWeAre() {
    ResumeRequest.Builder request = ResumeRequest.newBuilder().setRequestId(requestId);
    numTokens.forEach(
        (choice, offset) -> request.addPositions(ChoicePosition.newBuilder().setChoice(choice).setTokenOffset(offset)));
    return request.build();
  }

  private void take(GenerateEvent event) {
    switch (event.getEventCase()) {
      case STARTED -> isStarted = true;
      case DELTA -> {
        var delta = event.getDelta();
        show(delta.getText(), delta.getChoice(), delta.getTokenOffset() + delta.getTokenIdsCount());
      }
      case REASONING_DELTA -> {
        var delta = event.getReasoningDelta();
        show(delta.getText(), delta.getChoice(), delta.getTokenOffset() + delta.getTokenIdsCount());
      }
      case TOOL_CALL_DELTA -> {
        var delta = event.getToolCallDelta();
        show(delta.getName() + delta.getArguments(), delta.getChoice(), delta.getTokenOffset() + delta.getTokenIdsCount());
      }
      case USAGE -> finish(event.getUsage());
      default -> { }
    }
  }

  private void show(String text, int choice, int offset) {
    System.out.print(text);
    System.out.flush();
    numTokens.put(choice, offset);
  }

  private void finish(Usage usage) {
    isComplete = true;
    System.out.printf(
        "%n[%d prompt + %d output tokens, waited %.1f ms]%n",
        usage.getPromptTokens(), usage.getCompletionTokens(), usage.getTiming().getQueueMs());
  }

  /** The stable reason, and when to try again, come as trailers of text; all details are in grpc-status-details-bin. */
  private static void explain(StatusRuntimeException error) {
    Metadata trailers = error.getTrailers() == null ? new Metadata() : error.getTrailers();
    String reason = trailers.get(ERROR_REASON);
    Throwable cause = error.getStatus().getCause();
    System.err.printf(
        "error %s %s: %s%n",
        error.getStatus().getCode(),
        reason == null ? "CONNECTION" : reason,
        cause == null ? error.getStatus().getDescription() : cause.getMessage());
    if (trailers.containsKey(RETRY_AFTER_MS)) {
      System.err.printf("try again in %s ms%n", trailers.get(RETRY_AFTER_MS));
    }
  }

  private static Metadata.Key<String> key(String name) {
    return Metadata.Key.of(name, Metadata.ASCII_STRING_MARSHALLER);
  }
}

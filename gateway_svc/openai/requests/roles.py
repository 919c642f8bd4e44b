"""OpenAI's role "developer", its newer name for "system", which many templates do not know."""

from gateway_svc.calls import Call
from gateway_svc.chat.conversation import told_tools
from gateway_svc.generating.model_catalog import ModelCatalog
from gateway_svc.openai.requests.fields import AnyRequests
from protos.inference.v1 import inference_pb2 as pb

_NEWER, _OLDER = "developer", "system"


async def settle_roles(requests: AnyRequests, call: Call, catalog: ModelCatalog) -> None:
    """Change the role developer to system if the model's template does not mention developers."""
    for request in requests:
        if isinstance(request, pb.ChatRequest) and (turns := _developers_turns(request)):
            text = (await catalog.wait(request.model, call.remaining_s, call.span)).text
            if _NEWER not in text.template_for(has_tools=bool(told_tools(request))):
                for turn in turns:
                    turn.role = _OLDER


def _developers_turns(request: pb.ChatRequest) -> list[pb.Message]:
    return [message for message in request.messages if message.role == _NEWER]

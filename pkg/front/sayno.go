package front

import (
	"errors"
	"strings"
	"unicode"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/rpccode"
)

// saidNo is an error with who said no.
type saidNo struct {
	party deferral.Party
	error
}

// Unwrap gives the error itself, with its class or code.
func (s *saidNo) Unwrap() error { return s.error }

// GRPCStatus is that of a driver's error: its text alone, as if it were not wrapped.
func (s *saidNo) GRPCStatus() *status.Status {
	if said, ok := status.FromError(s.error); ok {
		return said
	}
	return nil
}

// by puts down who said no. Who was put down first is right: they stand nearest.
func by(party deferral.Party, err error) error {
	var known *saidNo
	if err == nil || errors.As(err, &known) {
		return err
	}
	return &saidNo{party, err}
}

func partyOf(err error) deferral.Party {
	var known *saidNo
	if errors.As(err, &known) {
		return known.party
	}
	return deferral.PartyNode
}

// byBroker tells by the class of an error who said no to a hand-over.
func byBroker(err error) error {
	switch deferral.KindOf(err) {
	case deferral.InUse, deferral.Denied, deferral.Busy, deferral.Timeout:
		return by(deferral.PartyDevice, err)
	case deferral.Unsupported:
		return by(deferral.PartyHandler, err)
	case deferral.Invalid, deferral.Conflict:
		return by(deferral.PartyRequest, err)
	default:
		return by(deferral.PartyNode, err)
	}
}

// tell ends a stage or a publish: a refusal is put on the list and made one
// sentence, for kubelet shows it with the pod. Anything else takes it off the list.
func (n *node) tell(draft deferral.Refusal, err error) error {
	if err == nil {
		n.forgetTarget(draft.Target)
		return nil
	}
	if status.Code(rpccode.Status(err)) == codes.Canceled {
		return err // kubelet went away, and nobody said no
	}
	party := partyOf(err)
	draft.Key = n.key(draft.Target)
	err = sentence(&draft, err)
	draft.Driver, draft.Party, draft.Error = n.name, party, status.Convert(err).Message()
	n.refused.note(draft)
	if n.cfg.OnRefused != nil {
		n.cfg.OnRefused(n.name, party)
	}
	return err
}

// sentence begins an error with the volume, and with the pod where that is known.
// A driver's words may be of many lines.
func sentence(draft *deferral.Refusal, err error) error {
	said := status.Convert(rpccode.Status(err)).Proto()
	text := oneLine(said.GetMessage())
	subject := "volume " + oneLine(draft.Target)
	for strings.HasPrefix(text, subject+": ") { // an error around another one may begin with it twice
		text = strings.TrimPrefix(text, subject+": ")
	}
	if draft.PodName != "" {
		subject += " of pod " + draft.PodNamespace + "/" + draft.PodName
	}
	said.Message = subject + ": " + text
	return status.FromProto(said).Err()
}

// mostSaid bounds what is repeated of an error. An event holds no more.
const mostSaid = 1024

// oneLine has no line ends or other controls in it, and is bounded.
func oneLine(text string) string {
	text = strings.Join(strings.FieldsFunc(text, func(r rune) bool { return unicode.IsControl(r) || r == ' ' }), " ")
	if len(text) > mostSaid {
		text = strings.ToValidUTF8(text[:mostSaid], "") + "..."
	}
	return strings.ToValidUTF8(text, "?")
}

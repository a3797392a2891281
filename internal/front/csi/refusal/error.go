// Package refusal words the errors by which a volume is refused, and lists the volumes that were.
package refusal

import (
	"cmp"
	"encoding/hex"
	"errors"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/ground/rpccode"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// partyError is an error together with the party that refused.
type partyError struct {
	party Party
	err   error
}

func (e *partyError) Error() string { return e.err.Error() }

func (e *partyError) Unwrap() error { return e.err }

// GRPCStatus is that of a driver's error: its text alone, as if it were not wrapped.
func (e *partyError) GRPCStatus() *status.Status {
	if known, ok := status.FromError(e.err); ok {
		return known
	}
	return nil
}

// WithParty records which party refused. An error that already names a party keeps it: the innermost caller knows best.
func WithParty(party Party, err error) error {
	if _, known := errors.AsType[*partyError](err); err == nil || known {
		return err
	}
	return &partyError{party, err}
}

// PartyOf is the party that refused, or the node.
func PartyOf(err error) Party {
	if known, ok := errors.AsType[*partyError](err); ok {
		return known.party
	}
	return PartyNode
}

// brokerParty is the party of the broker's errors; of all other kinds it is the node.
var brokerParty = map[volume.Kind]Party{
	volume.InUse: PartyDevice, volume.Denied: PartyDevice,
	volume.Busy: PartyDevice, volume.Timeout: PartyDevice,
	volume.Unsupported: PartyHandler,
	volume.Invalid:     PartyRequest, volume.Conflict: PartyRequest,
}

// WithBrokerParty derives the party from the kind of an error of the broker, and adds the advice for it.
func WithBrokerParty(err error) error {
	return WithParty(cmp.Or(brokerParty[volume.KindOf(err)], PartyNode), WithAdvice(err))
}

// IsFinal reports whether kubelet takes the error as the final answer: nothing was done,
// so kubelet does not ask to undo the call.
func IsFinal(err error) bool {
	switch status.Code(rpccode.Status(err)) {
	case codes.OK, codes.Canceled, codes.DeadlineExceeded, codes.Unavailable, codes.ResourceExhausted, codes.Aborted:
		return false
	default:
		return true
	}
}

// JoinUndo joins the cause of a failure with the error of undoing the call. While
// anything is left the error is one that kubelet retries.
func JoinUndo(target string, cause, undo error) error {
	if undo == nil {
		return cause
	}
	return WithParty(PartyOf(cause), volume.Errorf(volume.Busy, "volume %s: %w; and it could not be undone yet: %w", target,
		Plain(cause), Plain(undo)))
}

// NotFinal makes an error one that kubelet retries, for a volume that stays as an earlier
// call left it: after a final code kubelet would not ask to undo that call.
func NotFinal(name string, cause error) error {
	if !IsFinal(cause) {
		return cause
	}
	return WithParty(PartyOf(cause), volume.Errorf(volume.Busy, "volume %s: %w; the volume stays as an earlier call has left it",
		name, Plain(cause)))
}

// Plain is an error without its gRPC wrapping, which reads badly inside a text.
func Plain(err error) error {
	if known, ok := status.FromError(err); ok && known != nil {
		return errors.New(known.Message())
	}
	return err
}

// Sentence begins an error with the volume, and with the pod where that is known:
// kubelet shows it as an event of the pod. The error of a driver can have many lines.
func Sentence(draft *Refusal, err error) error {
	out := status.Convert(rpccode.Status(err)).Proto()
	text := OneLine(out.GetMessage())
	subject := "volume " + OneLine(draft.Target)
	for strings.HasPrefix(text, subject+": ") { // a wrapped error may begin with it twice
		text = strings.TrimPrefix(text, subject+": ")
	}
	if draft.PodName != "" {
		subject += " of pod " + draft.PodNamespace + "/" + draft.PodName
	}
	out.Message = subject + ": " + text
	return status.FromProto(out).Err()
}

// maxErrorText bounds the text of an error. An event holds no more.
const maxErrorText = 1024

// OneLine replaces line ends and other control characters, and bounds the text.
func OneLine(text string) string {
	text = strings.Join(strings.FieldsFunc(text, func(r rune) bool { return !sys.IsPrintable(r) || r == ' ' }), " ")
	if len(text) > maxErrorText {
		text = strings.ToValidUTF8(text[:maxErrorText], "") + "..."
	}
	return strings.ToValidUTF8(text, "?")
}

// Clip bounds a value that somebody else chose, and writes one with control characters in
// hexadecimal, so that it cannot fill or forge a log.
func Clip(s string) string {
	s = sys.ClipTo(s, 128)
	for _, c := range s {
		if !sys.IsPrintable(c) || c == 0xfffd {
			return "0x" + hex.EncodeToString([]byte(s))
		}
	}
	return s
}

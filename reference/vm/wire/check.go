package wire

import (
	"cmp"
	"errors"
	"fmt"
	"math"

	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

// checks are the checks of responses that have fields.
var checks = map[string]func(req, resp []byte) error{
	"Ping":           checkOf(checkPing),
	"Shutdown":       checkOf(checkShutdown),
	"AddVolume":      checkOf(func(_ *AddVolumeRequest, resp *AddVolumeResponse) error { return checkText(resp.GetWarning()) }),
	"GetVolumeStats": checkOf(checkStats),
	"WaitProcess": checkOf(func(_ *WaitProcessRequest, resp *WaitProcessResponse) error {
		return demand(resp.GetExitCode() <= math.MaxUint8, "the exit code %d", resp.GetExitCode())
	}),
	"ReadOutput": checkOf(func(req *ReadOutputRequest, resp *ReadOutputResponse) error {
		return demand(len(resp.GetData()) <= int(req.GetMax()), "%d bytes instead of at most %d", len(resp.GetData()), req.GetMax())
	}),
	"WriteInput": checkOf(func(req *WriteInputRequest, resp *WriteInputResponse) error {
		return demand(int(resp.GetWritten()) <= len(req.GetData()), "%d bytes written of %d", resp.GetWritten(), len(req.GetData()))
	}),
}

// checkOf decodes request and response for a check.
func checkOf[Req, Resp any, PReq interface {
	*Req
	proto.Message
}, PResp interface {
	*Resp
	proto.Message
}](check func(PReq, PResp) error) func(req, resp []byte) error {
	return func(rawReq, rawResp []byte) error {
		req, resp := PReq(new(Req)), PResp(new(Resp))
		if err := errors.Join(proto.Unmarshal(rawReq, req), proto.Unmarshal(rawResp, resp)); err != nil {
			return errors.New("it cannot be decoded")
		}
		return check(req, resp)
	}
}

// demand gives an error where something does not hold.
func demand(holds bool, format string, args ...any) error {
	if holds {
		return nil
	}
	return fmt.Errorf(format, args...)
}

func checkPing(_ *PingRequest, resp *PingResponse) error {
	got := resp.GetProtocol()
	return demand(got == Protocol, "it has version %d of the protocol instead of %d: crust-vm-agent is of another build", got, Protocol)
}

func checkShutdown(_ *ShutdownRequest, resp *ShutdownResponse) error {
	err := demand(len(resp.GetErrors()) <= 64, "too many errors")
	for _, text := range resp.GetErrors() {
		err = cmp.Or(err, checkText(text))
	}
	return err
}

// reasons are the known reasons of an abnormal condition.
var reasons = map[string]bool{"": true, abi.ReasonShutDown: true, abi.ReasonReadOnly: true, abi.ReasonErrors: true, abi.ReasonFrozen: true}

func checkStats(_ *GetVolumeStatsRequest, resp *GetVolumeStatsResponse) error {
	seen := make(map[string]bool)
	for _, u := range resp.GetUsage() {
		if unit := u.GetUnit(); unit != "BYTES" && unit != "INODES" || seen[unit] {
			return errors.New("an unknown or repeated unit")
		}
		seen[u.GetUnit()] = true
		if u.GetAvailable() < 0 || u.GetUsed() < 0 || u.GetTotal() < 0 ||
			u.GetAvailable() > u.GetTotal() || u.GetUsed() > u.GetTotal()-u.GetAvailable() {
			return fmt.Errorf("%d available and %d used of %d", u.GetAvailable(), u.GetUsed(), u.GetTotal())
		}
	}
	if !reasons[resp.GetReason()] || (resp.GetReason() != "") != resp.GetAbnormal() {
		return errors.New("an unknown condition")
	}
	return checkText(resp.GetMessage())
}

func checkText(text string) error {
	return demand(len(text) <= maxText && sys.IsText(text), "a text that is too long or not printable")
}

package wire

import (
	"errors"
	"fmt"
	"math"

	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

// checks looks at the answers that say anything.
var checks = map[string]func(req, resp []byte) error{
	"Ping":           checkOf(checkPing),
	"Shutdown":       checkOf(checkShutdown),
	"AddVolume":      checkOf(checkAdded),
	"GetVolumeStats": checkOf(checkStats),
	"WaitProcess":    checkOf(checkExit),
	"ReadOutput":     checkOf(checkOutput),
	"WriteInput":     checkOf(checkWritten),
}

// checkOf decodes question and answer for a check.
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
			return errors.New("it cannot be read")
		}
		return check(req, resp)
	}
}

func checkPing(_ *PingRequest, is *PingResponse) error {
	if is.GetProtocol() != Protocol {
		return fmt.Errorf("it speaks version %d of the wire, and not %d: crust-vm-agent is of another build", is.GetProtocol(), Protocol)
	}
	return nil
}

func checkShutdown(_ *ShutdownRequest, is *ShutdownResponse) error {
	if len(is.GetErrors()) > 64 {
		return errors.New("too many errors")
	}
	var err error
	for _, text := range is.GetErrors() {
		err = errors.Join(err, checkText(text))
	}
	return err
}

func checkAdded(_ *AddVolumeRequest, is *AddVolumeResponse) error {
	return checkText(is.GetWarning())
}

// reasons are the words for what is wrong with a filesystem.
var reasons = map[string]bool{"": true, abi.ReasonShutDown: true, abi.ReasonReadOnly: true, abi.ReasonErrors: true, abi.ReasonFrozen: true}

func checkStats(_ *GetVolumeStatsRequest, is *GetVolumeStatsResponse) error {
	seen := make(map[string]bool)
	for _, u := range is.GetUsage() {
		if unit := u.GetUnit(); unit != "BYTES" && unit != "INODES" || seen[unit] {
			return errors.New("a unit that is not known, or twice")
		}
		seen[u.GetUnit()] = true
		if u.GetAvailable() < 0 || u.GetUsed() < 0 || u.GetTotal() < 0 ||
			u.GetAvailable() > u.GetTotal() || u.GetUsed() > u.GetTotal()-u.GetAvailable() {
			return fmt.Errorf("%d available and %d used of %d", u.GetAvailable(), u.GetUsed(), u.GetTotal())
		}
	}
	if !reasons[is.GetReason()] || (is.GetReason() != "") != is.GetAbnormal() {
		return errors.New("a condition that is not known")
	}
	return checkText(is.GetMessage())
}

func checkExit(_ *WaitProcessRequest, is *WaitProcessResponse) error {
	if is.GetExitCode() > math.MaxUint8 {
		return fmt.Errorf("the exit code %d", is.GetExitCode())
	}
	return nil
}

func checkOutput(req *ReadOutputRequest, is *ReadOutputResponse) error {
	if len(is.GetData()) > int(req.GetMax()) {
		return fmt.Errorf("%d bytes instead of at most %d", len(is.GetData()), req.GetMax())
	}
	return nil
}

func checkWritten(req *WriteInputRequest, is *WriteInputResponse) error {
	if int(is.GetWritten()) > len(req.GetData()) {
		return fmt.Errorf("%d bytes taken of %d", is.GetWritten(), len(req.GetData()))
	}
	return nil
}

func checkText(text string) error {
	if len(text) > maxText || !sys.IsText(text) {
		return errors.New("a text that is long or not printable")
	}
	return nil
}

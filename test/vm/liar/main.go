// Command liar is a guest's program in place of crust-vm-agent: it says OK to all that the
// host asks, does nothing of it, and lies as the processes say that it is asked to execute.
package main

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/containerd/ttrpc"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/reference/vm/guest"
	"github.com/crust-proxy/crust-proxy/reference/vm/wire"
)

func main() {
	if len(os.Args) < 2 || os.Args[1] != "agent" {
		os.Exit(guest.Main(os.Args)) // the first process, which starts the agent
	}
	port, err := openPort()
	if err == nil {
		err = (&liar{port: port}).serve()
	}
	fmt.Fprintln(os.Stderr, "liar:", err)
	os.Exit(1)
}

func openPort() (*os.File, error) {
	for {
		names, err := filepath.Glob("/sys/class/virtio-ports/*/name")
		if err != nil {
			return nil, err
		}
		for _, name := range names {
			if is, err := os.ReadFile(name); err == nil && strings.TrimSpace(string(is)) == wire.Port {
				return os.OpenFile("/dev/"+filepath.Base(filepath.Dir(name)), os.O_RDWR, 0)
			}
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// liar speaks the wire by itself: what serves it in earnest would not say all of this.
type liar struct {
	port *os.File
	lie  string
	// waits is where the end of the container is to be answered.
	waits uint32
}

const headerSize, typeResponse = 10, 2

func (l *liar) serve() error {
	for {
		var header [headerSize]byte
		if _, err := io.ReadFull(l.port, header[:]); errors.Is(err, io.EOF) {
			time.Sleep(10 * time.Millisecond) // nobody has the other end open yet
			continue
		} else if err != nil {
			return err
		}
		body := make([]byte, binary.BigEndian.Uint32(header[:]))
		if _, err := io.ReadFull(l.port, body); err != nil {
			return err
		}
		var asked ttrpc.Request
		if err := proto.Unmarshal(body, &asked); err != nil {
			return err
		}
		if err := l.answer(binary.BigEndian.Uint32(header[4:]), &asked); err != nil {
			return err
		}
	}
}

func (l *liar) answer(stream uint32, asked *ttrpc.Request) error {
	switch asked.Method {
	case "ExecProcess":
		l.lie = wordOf(asked.Payload)
	case "Shutdown":
		os.Exit(1)
	case "WaitProcess", "ReadOutput":
		var of wire.WaitProcessRequest // the process is the first field of both
		if err := proto.Unmarshal(asked.Payload, &of); err != nil || of.GetProcess().GetExec() == "" {
			if asked.Method == "WaitProcess" {
				l.waits = stream
			}
			return err // the container runs on
		}
	case "SignalProcess":
		if l.lie == "undeletable" {
			ended, _ := proto.Marshal(&ttrpc.Response{Payload: payload(&wire.WaitProcessResponse{ExitCode: 137})})
			if err := l.write(frame(l.waits, ended), asked.Method); err != nil {
				return err
			}
		}
	}
	said := &ttrpc.Response{Payload: truth(asked)}
	if lie, is := lies[l.lie]; is && lie.method == asked.Method {
		if said = lie.answer(); said == nil {
			return nil
		}
	}
	raw, err := proto.Marshal(said)
	if err != nil {
		return err
	}
	return l.write(frame(stream, raw), asked.Method)
}

// write also has the lies that are not in the answers.
func (l *liar) write(raw []byte, method string) error {
	switch {
	case l.lie == "die" && method == "GetVolumeStats":
		os.Exit(1)
	case l.lie == "flood" && method == "GetVolumeStats":
		for stream := uint32(1001); ; stream += 2 {
			if _, err := l.port.Write(frame(stream, make([]byte, wire.MaxFrame))); err != nil {
				return err
			}
		}
	case l.lie == "drip" && (method == "GetVolumeStats" || method == "Ping"):
		for _, one := range raw {
			if _, err := l.port.Write([]byte{one}); err != nil {
				return err
			}
			time.Sleep(time.Second)
		}
		return nil
	}
	_, err := l.port.Write(raw)
	return err
}

func frame(stream uint32, body []byte) []byte {
	out := binary.BigEndian.AppendUint32(nil, uint32(len(body)))
	out = binary.BigEndian.AppendUint32(out, stream)
	return append(append(out, typeResponse, 0), body...)
}

// wordOf is the last argument of a process.
func wordOf(raw []byte) string {
	var req wire.ExecProcessRequest
	var process specs.Process
	if proto.Unmarshal(raw, &req) != nil || json.Unmarshal(req.GetSpec(), &process) != nil || len(process.Args) == 0 {
		return ""
	}
	return process.Args[len(process.Args)-1]
}

// truth is an answer that the host believes. That of most calls is empty.
func truth(asked *ttrpc.Request) []byte {
	var is proto.Message
	switch asked.Method {
	case "Ping":
		is = &wire.PingResponse{Protocol: wire.Protocol}
	case "GetVolumeStats":
		is = usage(1000, 400, 500)
	default:
		return nil
	}
	return payload(is)
}

func payload(is proto.Message) []byte {
	raw, _ := proto.Marshal(is)
	return raw
}

func usage(total, used, available int64) *wire.GetVolumeStatsResponse {
	return &wire.GetVolumeStatsResponse{Usage: []*wire.Usage{{Unit: abi.UnitBytes, Total: total, Used: used, Available: available}}}
}

// lie is a false answer to a method; nil is none at all.
type lie struct {
	method string
	answer func() *ttrpc.Response
}

func says(method string, is proto.Message) lie {
	return lie{method, func() *ttrpc.Response { return &ttrpc.Response{Payload: payload(is)} }}
}

func fails(method string, code codes.Code, text string) lie {
	return lie{method, func() *ttrpc.Response {
		return &ttrpc.Response{Status: &status.Status{Code: int32(code), Message: text}} //nolint:gosec // a code
	}}
}

var lies = map[string]lie{
	"negative":    says("GetVolumeStats", usage(1000, -1, 0)),
	"overflow":    says("GetVolumeStats", usage(math.MaxInt64, math.MaxInt64, math.MaxInt64)),
	"word":        says("GetVolumeStats", &wire.GetVolumeStatsResponse{Abnormal: true, Reason: "Haunted"}),
	"text":        fails("GetVolumeStats", codes.Internal, strings.Repeat("volume pv-other \x1b[2J\n", 10_000)),
	"gone":        fails("GetVolumeStats", codes.NotFound, "volume pv-other: it has ended"),
	"size":        fails("ResizeVolume", codes.OutOfRange, "the disk is small"),
	"immortal":    says("SignalProcess", new(wire.Empty)),
	"undeletable": fails("DeleteProcess", codes.Internal, "it is busy"),
	"silence":     {"GetVolumeStats", func() *ttrpc.Response { return nil }},
}

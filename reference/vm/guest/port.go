package guest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/sys"
	"github.com/crust-proxy/crust-proxy/reference/vm/wire"
)

// portTime is how long the machine may take to have the port.
const portTime = 60 * time.Second

// openPort opens the virtio-serial port of a name.
func openPort(ctx context.Context, name string) (*port, error) {
	ctx, cancel := context.WithTimeout(ctx, portTime)
	defer cancel()
	for {
		path, err := findBy("/sys/class/virtio-ports/*/name", name)
		if err == nil {
			file, err := os.OpenFile("/dev/"+filepath.Base(filepath.Dir(path)), os.O_RDWR, 0)
			return &port{File: file}, err
		}
		if !errors.Is(err, os.ErrNotExist) || !sys.Sleep(ctx, 10*time.Millisecond) {
			return nil, fmt.Errorf("the port to the host: %w", err)
		}
	}
}

// findBy finds the file of the kernel that holds just this line.
func findBy(pattern, line string) (string, error) {
	files, err := filepath.Glob(pattern)
	if err != nil {
		return "", err
	}
	for _, file := range files {
		if is, err := sys.ReadLine(file); err == nil && is == line {
			return file, nil
		}
	}
	return "", fmt.Errorf("%s: %w", line, os.ErrNotExist)
}

// port is a virtio-serial port as a connection.
type port struct{ *os.File }

func (p *port) LocalAddr() net.Addr  { return portAddr(p.Name()) }
func (p *port) RemoteAddr() net.Addr { return portAddr("host") }

type portAddr string

func (a portAddr) Network() string { return "virtio-serial" }
func (a portAddr) String() string  { return string(a) }

// serve answers the host as long as the machine runs. While nobody has the port open on
// the host, it reads as at its end.
func serve(ctx context.Context, agent wire.AgentService) error {
	for {
		conn, err := openPort(ctx, wire.Port)
		if err != nil {
			return err
		}
		if err := wire.Serve(ctx, conn, agent, codeOf); err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if !sys.Sleep(ctx, 20*time.Millisecond) {
			return ctx.Err()
		}
	}
}

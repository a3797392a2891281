package guest

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/sys"
)

// portTime is how long the machine may take to have the port.
const portTime = 60 * time.Second

// ports is a listener: its connection is the virtio-serial port of a name, again and
// again. While nobody has the port open on the host, it reads as at its end.
type ports struct {
	name string
	free chan struct{} // holds a token while there is no connection
}

// Accept opens the port when the last connection is over.
func (p *ports) Accept() (net.Conn, error) {
	<-p.free
	ctx, cancel := context.WithTimeout(context.Background(), portTime)
	defer cancel()
	sys.Sleep(ctx, pollTime) // nobody may have it open
	var path string
	err := retry(ctx, os.ErrNotExist, func() (err error) {
		path, err = findBy("/sys/class/virtio-ports/*/name", p.name)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("the port to the host: %w", err)
	}
	file, err := os.OpenFile("/dev/"+filepath.Base(filepath.Dir(path)), os.O_RDWR, 0)
	return &port{File: file, of: p}, err
}

// Close has nothing to do.
func (p *ports) Close() error { return nil }

// Addr is the name of the port.
func (p *ports) Addr() net.Addr { return &net.UnixAddr{Name: p.name} }

// port is a virtio-serial port as a connection.
type port struct {
	*os.File
	of *ports
}

func (p *port) LocalAddr() net.Addr  { return p.of.Addr() }
func (p *port) RemoteAddr() net.Addr { return p.of.Addr() }

// Close lets the port be opened again.
func (p *port) Close() error {
	err := p.File.Close()
	if err == nil { // and not closed before
		p.of.free <- struct{}{}
	}
	return err
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

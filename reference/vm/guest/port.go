package guest

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// portTimeout bounds the wait for the port to appear.
const portTimeout = 60 * time.Second

// ports is a listener on a virtio-serial port, which is one connection at a time. When the host
// does not have the port open, a read returns EOF, and Accept opens the port again.
type ports struct {
	name string
	free chan struct{} // holds a token while there is no connection
}

// Accept opens the port after the last connection was closed.
func (p *ports) Accept() (net.Conn, error) {
	<-p.free
	ctx, cancel := context.WithTimeout(context.Background(), portTimeout)
	defer cancel()
	sys.Sleep(ctx, pollInterval) // the host may not have it open yet
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

// Close does nothing.
func (p *ports) Close() error { return nil }

func (p *ports) Addr() net.Addr { return &net.UnixAddr{Name: p.name} }

// port is a virtio-serial port as a connection.
type port struct {
	*os.File
	of *ports
}

func (p *port) LocalAddr() net.Addr  { return p.of.Addr() }
func (p *port) RemoteAddr() net.Addr { return p.of.Addr() }

// Close lets Accept open the port again.
func (p *port) Close() error {
	err := p.File.Close()
	if err == nil { // it was open
		p.of.free <- struct{}{}
	}
	return err
}

// findBy returns the file in sysfs whose content is this line.
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

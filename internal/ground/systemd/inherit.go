package systemd

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"

	"github.com/coreos/go-systemd/v22/activation"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// Inherited holds the descriptors that the service manager passed at the start.
type Inherited struct {
	// Listeners are the sockets, by the names of their socket units' FileDescriptorName=.
	Listeners map[string]net.Listener
	// Stored are the descriptors of the file-descriptor store, by name.
	Stored map[string]*os.File
}

// Inherit returns the descriptors that were passed, and unsets their environment variables.
// The given names are those of sockets; everything else was stored by us.
func Inherit(sockets ...string) (*Inherited, error) {
	return classify(activation.Files(true), sockets)
}

// classify separates listeners from stored descriptors.
func classify(files []*os.File, sockets []string) (*Inherited, error) {
	in := &Inherited{Listeners: map[string]net.Listener{}, Stored: map[string]*os.File{}}
	var problems []error
	for _, file := range files {
		switch name := file.Name(); {
		case slices.Contains(sockets, name):
			problems = append(problems, in.addListener(file))
		case in.Stored[name] != nil: // a leftover: a descriptor is removed from the store before another one of its name is stored
			_ = file.Close()
		default:
			in.Stored[name] = file
		}
	}
	if err := errors.Join(problems...); err != nil {
		return nil, errors.Join(err, in.Close())
	}
	return in, nil
}

// addListener adds a listener, which has a duplicate of the descriptor, and closes the file.
func (in *Inherited) addListener(file *os.File) error {
	name := file.Name()
	defer func() { _ = file.Close() }()
	if in.Listeners[name] != nil {
		return fmt.Errorf("systemd passed two sockets named %q: leave one ListenStream= in the socket unit", name)
	}
	if err := sys.OnFD(file, mustListen); err != nil {
		return fmt.Errorf("the socket %q of systemd: %w", name, err)
	}
	listener, err := net.FileListener(file)
	if err != nil {
		return fmt.Errorf("the socket %q of systemd: %w", name, err)
	}
	in.Listeners[name] = listener
	return nil
}

// mustListen accepts only listening unix stream sockets: for no others does the kernel know the peer.
func mustListen(fd int) error {
	for option, want := range map[int]int{
		unix.SO_DOMAIN: unix.AF_UNIX, unix.SO_TYPE: unix.SOCK_STREAM, unix.SO_ACCEPTCONN: 1,
	} {
		is, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, option)
		if err != nil {
			return err
		}
		if is != want {
			return errors.New("it is not a listening unix stream socket: use ListenStream=/an/absolute/path, with Accept=no")
		}
	}
	return nil
}

// Close closes everything that was passed, after a failed start.
func (in *Inherited) Close() error {
	var problems []error
	for _, listener := range in.Listeners {
		problems = append(problems, listener.Close())
	}
	for _, file := range in.Stored {
		problems = append(problems, file.Close())
	}
	return errors.Join(problems...)
}

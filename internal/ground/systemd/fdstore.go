package systemd

import (
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"time"
)

// nameForm is stricter than systemd's rule: no name can contain a separator of the protocol or of $LISTEN_FDNAMES.
var nameForm = regexp.MustCompile(`^[A-Za-z0-9-]{1,255}$`)

// StoreFD stores a duplicate of a descriptor in the service manager, which passes it to the next start of the service.
// It returns when the manager has processed the message, so that a kill right afterwards loses nothing. FDPOLL=0:
// systemd must not drop a device's descriptor because poll reports an error on it.
func (n *Notifier) StoreFD(name string, file *os.File) error {
	return n.storeOrRemove("store", name, "FDSTORE=1\nFDNAME="+name+"\nFDPOLL=0", file)
}

// RemoveFD removes the descriptors of a name from the service manager. It returns when the
// manager has processed the message. systemd closes its copy later, in a process of its own,
// so only the kernel can say whether a device is free again.
func (n *Notifier) RemoveFD(name string) error {
	return n.storeOrRemove("remove", name, "FDSTOREREMOVE=1\nFDNAME="+name, nil)
}

func (n *Notifier) storeOrRemove(verb, name, state string, file *os.File) error {
	if !nameForm.MatchString(name) {
		return fmt.Errorf("%s a descriptor: %q is not a name of [A-Za-z0-9-], at most 255 long", verb, name)
	}
	if !n.stores {
		return nil
	}
	err := n.send(state, file)
	if err == nil {
		err = n.barrier()
	}
	if err != nil {
		return fmt.Errorf("%s the descriptor %s: %w", verb, name, err)
	}
	return nil
}

// barrier waits until the service manager has processed all earlier messages: then it closes
// the descriptor that was sent with BARRIER=1.
func (n *Notifier) barrier() error {
	ours, theirs, err := os.Pipe()
	if err != nil {
		return err
	}
	defer func() { _ = ours.Close() }()
	if err := errors.Join(n.send("BARRIER=1", theirs), theirs.Close()); err != nil {
		return err
	}
	if err := ours.SetReadDeadline(time.Now().Add(answerTime)); err != nil {
		return err
	}
	_, err = ours.Read(make([]byte, 1))
	if errors.Is(err, io.EOF) {
		return nil
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return fmt.Errorf("systemd did not process it within %v: %w", answerTime, err)
	}
	return fmt.Errorf("wait for systemd: %w", err)
}

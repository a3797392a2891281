package kata

import (
	"bytes"
	"io"
	"net"
	"net/http"
)

// misbehave does what the fault says and reports whether that was the answer.
func (s *Shim) misbehave(w http.ResponseWriter, r *http.Request) bool {
	var fault Fault
	s.locked(func() { fault = s.fault })
	switch fault {
	case NoFault:
		return false
	case Hang:
		<-r.Context().Done()
	case ServerError:
		http.Error(w, "rpc error: code = Internal desc = the agent is \x1b[31mill\x1b[0m", http.StatusInternalServerError)
	case NotFound:
		http.NotFound(w, r)
	case WrongJSON:
		_, _ = io.WriteString(w, `{"usage": "much"}`)
	case Negative:
		_, _ = io.WriteString(w, s.negative())
	default:
		if c := hijack(w); c != nil {
			writeFault(c, fault)
			_ = c.Close()
		}
	}
	return true
}

// hangUp closes the connection without an answer.
func hangUp(w http.ResponseWriter) {
	if c := hijack(w); c != nil {
		_ = c.Close()
	}
}

// hijack is for answers that net/http would not let pass.
func hijack(w http.ResponseWriter) net.Conn {
	hijacker, ok := w.(http.Hijacker)
	if !ok {
		return nil
	}
	c, _, err := hijacker.Hijack()
	if err != nil {
		return nil
	}
	return c
}

// writeFault writes until it is done or the other side has had enough.
func writeFault(c net.Conn, fault Fault) {
	block := bytes.Repeat([]byte("x"), 64<<10)
	const head = "HTTP/1.1 200 OK\r\n"
	switch fault {
	case HalfBody:
		_, _ = io.WriteString(c, head+"Content-Length: 100\r\n\r\n{\"usage\":[")
	case HugeBody:
		_, _ = io.WriteString(c, head+"Content-Length: 1073741824\r\n\r\n")
		repeat(c, block, 1<<30/len(block))
	case HugeLength:
		_, _ = io.WriteString(c, head+"Content-Length: 1073741824\r\n\r\n")
		_, _ = io.Copy(io.Discard, c) // until the other side has had enough
	case HugeHeader:
		_, _ = io.WriteString(c, head+"X: ")
		repeat(c, block, 1<<30/len(block))
	case EndlessChunks:
		_, _ = io.WriteString(c, head+"Transfer-Encoding: chunked\r\n\r\n")
		repeat(c, append(append([]byte("10000\r\n"), block...), '\r', '\n'), 1<<30/len(block))
	case NotHTTP:
		_, _ = io.WriteString(c, "SSH-2.0-nothing\r\n\r\n")
	}
}

func repeat(w io.Writer, block []byte, times int) {
	for range times {
		if _, err := w.Write(block); err != nil {
			return
		}
	}
}

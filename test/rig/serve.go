package rig

import (
	"errors"
	"net"
	"os"

	"google.golang.org/grpc"
)

// Server is a gRPC server at a socket.
type Server struct {
	*grpc.Server

	socket string
	ended  chan struct{}
}

// Serve serves at a socket. One that is left of an earlier life is replaced.
func Serve(socket string, services func(*grpc.Server), options ...grpc.ServerOption) (*Server, error) {
	if err := removeSocket(socket); err != nil {
		return nil, err
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		return nil, err
	}
	listener.SetUnlinkOnClose(false)
	s := &Server{Server: grpc.NewServer(options...), socket: socket, ended: make(chan struct{})}
	services(s.Server)
	go func() {
		defer close(s.ended)
		_ = s.Serve(listener) // ends with Kill
	}()
	return s, nil
}

// Wait waits for its end.
func (s *Server) Wait() { <-s.ended }

// Kill ends it as a kill does: the socket stays.
func (s *Server) Kill() {
	s.Stop()
	s.Wait()
}

// End ends it, and takes the socket away.
func (s *Server) End() error {
	s.Kill()
	return removeSocket(s.socket)
}

func removeSocket(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

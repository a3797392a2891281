package peercred

import (
	"context"
	"fmt"
	"net"

	"google.golang.org/grpc/credentials"
)

const authType = "peercred"

// AuthInfo is what gRPC keeps about a connection.
type AuthInfo struct {
	credentials.CommonAuthInfo
	Peer Peer
}

// AuthType names the kind of credentials.
func (AuthInfo) AuthType() string { return authType }

type transport struct{}

// Credentials returns gRPC transport credentials for unix sockets. Nothing is sent: the
// kernel knows the peer. Any other kind of connection is refused.
func Credentials() credentials.TransportCredentials { return transport{} }

// ServerHandshake identifies the client.
func (transport) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return identify(conn)
}

// ClientHandshake identifies the server.
func (transport) ClientHandshake(_ context.Context, _ string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return identify(conn)
}

// Info describes the credentials.
func (transport) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: authType}
}

// Clone returns the same credentials: they have no state.
func (t transport) Clone() credentials.TransportCredentials { return t }

// OverrideServerName does nothing.
func (transport) OverrideServerName(string) error { return nil }

func identify(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	local, ok := conn.(*net.UnixConn)
	if !ok {
		return nil, nil, fmt.Errorf("peer credentials need a unix socket, not %T", conn)
	}
	who, err := Of(local)
	if err != nil {
		return nil, nil, err
	}
	// The bytes never leave the kernel of this node.
	level := credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}
	return conn, AuthInfo{CommonAuthInfo: level, Peer: who}, nil
}
